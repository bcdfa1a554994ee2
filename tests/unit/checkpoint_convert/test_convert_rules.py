"""Properties of the split rules: merging undoes splitting bit for bit, for any sizes; layouts are Megatron's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from checkpoint_convert.rules import QKV, Column, Copy, FusedGatedMLP, GatedMLP, Row, Rule, Vocab

small = st.integers(1, 5)
trailing = st.lists(st.integers(1, 4), max_size=1)  # weights have an input dimension, biases none
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bit pattern, NaNs and infinities included."""
    size = 1
    for n in shape:
        size *= n
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_raw(a), _raw(b))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check_round_trip(rule: Rule, hf: list[Tensor], tp: int) -> list[Tensor]:
    shards = [rule.split(hf, rank, tp) for rank in range(tp)]
    assert len({tuple(shard.shape) for shard in shards}) == 1
    merged = rule.merge(shards)
    assert len(merged) == len(hf)
    assert all(same_bits(a, b) for a, b in zip(merged, hf, strict=True))
    return shards


@settings(deadline=None)
@given(tp=small, rows=small, rest=trailing, dtype=dtypes)
def test_column_and_copy_round_trip(tp: int, rows: int, rest: list[int], dtype: torch.dtype) -> None:
    tensor = random_bits((tp * rows, *rest), dtype)
    shards = check_round_trip(Column(), [tensor], tp)
    assert all(shard.shape[0] == rows for shard in shards)
    check_round_trip(Copy(), [tensor], tp)


@settings(deadline=None)
@given(tp=small, columns=small, rows=small, dtype=dtypes)
def test_row_round_trip(tp: int, columns: int, rows: int, dtype: torch.dtype) -> None:
    shards = check_round_trip(Row(), [random_bits((rows, tp * columns), dtype)], tp)
    assert all(shard.shape == (rows, columns) for shard in shards)


@settings(deadline=None)
@given(tp=small, rows=small, rest=trailing, dtype=dtypes)
def test_gated_mlp_round_trip_and_layout(tp: int, rows: int, rest: list[int], dtype: torch.dtype) -> None:
    gate, up = random_bits((tp * rows, *rest), dtype), random_bits((tp * rows, *rest), dtype)
    shards = check_round_trip(GatedMLP(), [gate, up], tp)
    for rank, shard in enumerate(shards):
        assert same_bits(shard[:rows], gate[rank * rows : (rank + 1) * rows])
        assert same_bits(shard[rows:], up[rank * rows : (rank + 1) * rows])


@settings(deadline=None)
@given(tp=small, rows=small, rest=trailing, dtype=dtypes)
def test_a_fused_gate_and_up_projection_splits_like_two(
    tp: int, rows: int, rest: list[int], dtype: torch.dtype
) -> None:
    fused = random_bits((2 * tp * rows, *rest), dtype)
    shards = check_round_trip(FusedGatedMLP(), [fused], tp)
    apart = [fused[: tp * rows], fused[tp * rows :]]
    for rank, shard in enumerate(shards):
        assert same_bits(shard, GatedMLP().split(apart, rank, tp))


@settings(deadline=None)
@given(tp=st.integers(1, 9), vocab=st.integers(1, 40), hidden=small, dtype=dtypes)
def test_vocab_round_trip_pads_with_zeros(tp: int, vocab: int, hidden: int, dtype: torch.dtype) -> None:
    shards = check_round_trip(Vocab(vocab), [random_bits((vocab, hidden), dtype)], tp)
    whole = torch.cat(shards)
    assert vocab <= whole.shape[0] < vocab + tp
    assert not _raw(whole[vocab:]).any()


@settings(deadline=None)
@given(
    data=st.data(),
    groups=small,
    heads_per_group=small,
    head_dim=st.sampled_from([2, 4, 6]),
    rest=trailing,
    dtype=dtypes,
)
def test_qkv_round_trip_at_every_divisor(
    data: st.DataObject, groups: int, heads_per_group: int, head_dim: int, rest: list[int], dtype: torch.dtype
) -> None:
    heads = groups * heads_per_group
    fused_rows = groups * (heads_per_group + 2) * head_dim
    # Also rank counts above the number of key/value heads, where parts end inside a head.
    tp = data.draw(st.sampled_from([n for n in range(1, 17) if fused_rows % n == 0]))
    hf = [random_bits((n * head_dim, *rest), dtype) for n in (heads, groups, groups)]
    shards = check_round_trip(QKV(heads, groups, head_dim), hf, tp)
    assert all(shard.shape[0] == fused_rows // tp for shard in shards)


def test_a_dimension_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="size 7 cannot be split over 2"):
        Column().split([torch.zeros(7, 2)], 0, 2)


@pytest.mark.parametrize(("heads", "groups", "tp"), [(6, 2, 1), (6, 2, 2), (8, 2, 4), (4, 1, 4), (8, 4, 2)])
def test_qkv_shards_give_megatrons_attention_the_right_heads(heads: int, groups: int, tp: int) -> None:
    """Replays `SelfAttention.get_query_key_value_tensors` of megatron-core 0.16 on the shards, in exact integers."""
    head_dim, hidden, tokens = 4, 10, 3
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randint(-9, 9, (n * head_dim, hidden), generator=generator).double() for n in (heads, groups, groups)
    )
    x = torch.randint(-9, 9, (tokens, hidden), generator=generator).double()
    want_q, want_k, want_v = ((x @ w.T).reshape(tokens, -1, head_dim) for w in (q, k, v))

    outputs = [x @ QKV(heads, groups, head_dim).split([q, k, v], rank, tp).T for rank in range(tp)]
    for rank in range(tp):
        mixed, groups_here = outputs[rank], groups // tp
        if groups < tp:
            # All ranks' outputs are gathered and the rank's group is cut out of them.
            mixed, groups_here = torch.cat(outputs, dim=-1), 1
            size = mixed.shape[-1] // groups
            group = rank // (tp // groups)
            mixed = mixed[:, group * size : (group + 1) * size]
        per_group = heads // groups
        parts = mixed.view(tokens, groups_here, -1).split([per_group * head_dim, head_dim, head_dim], dim=-1)
        query = parts[0].reshape(tokens, -1, head_dim)
        if groups < tp:
            ranks_per_group = tp // groups
            size = per_group // ranks_per_group
            query = query[:, rank % ranks_per_group * size :][:, :size]
        heads_here = heads // tp
        assert torch.equal(query, want_q[:, rank * heads_here : (rank + 1) * heads_here])
        first = rank * groups // tp
        assert torch.equal(parts[1].reshape(tokens, -1, head_dim), want_k[:, first : first + groups_here])
        assert torch.equal(parts[2].reshape(tokens, -1, head_dim), want_v[:, first : first + groups_here])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gated_mlp_and_row_shards_add_up_to_the_hf_mlp(tp: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, ffn = 6, 20
    gate, up = (torch.randn(ffn, hidden, generator=generator, dtype=torch.float64) for _ in range(2))
    down = torch.randn(hidden, ffn, generator=generator, dtype=torch.float64)
    x = torch.randn(5, hidden, generator=generator, dtype=torch.float64)
    want = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    total = torch.zeros_like(want)
    for rank in range(tp):
        halves = (x @ GatedMLP().split([gate, up], rank, tp).T).chunk(2, dim=-1)
        total += (torch.nn.functional.silu(halves[0]) * halves[1]) @ Row().split([down], rank, tp).T
    assert torch.allclose(total, want, rtol=1e-12, atol=1e-12)
