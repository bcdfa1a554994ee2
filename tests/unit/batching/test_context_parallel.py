"""The split of packed sequences over context-parallel ranks, against attention that sees the whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.batching.context_parallel import context_shard
from dapo_megatron.batching.pack import pack


def sequences(lengths: list[tuple[int, int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(len(lengths))
    return [(rng.integers(4, 80, p), rng.integers(4, 80, r)) for p, r in lengths]


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=0, max_size=6)


@given(LENGTHS, st.sampled_from([2, 3, 4]), st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_every_token_and_every_scored_row_is_on_exactly_one_rank(lengths, cp: int, tp: int) -> None:
    packed = pack(sequences(lengths), pad_to_multiple=2 * cp * tp, sequence_multiple=2 * cp)
    total = packed.tokens.shape[1]
    assert total % (2 * cp * tp) == 0 and all(n % (2 * cp) == 0 for n in packed.cu_seqlens.diff().tolist())
    shards = [context_shard(packed, cp, rank) for rank in range(cp)]
    assert [s.tokens.shape[1] for s in shards] == [total // cp] * cp
    order = torch.cat([s.order for s in shards])
    assert sorted(order.tolist()) == list(range(packed.targets.numel()))
    for shard in shards:
        # A token is found again by its position in its sequence: rows hold the token whose successor is the target.
        positions = packed.position_ids[0, packed.rows[shard.order]]
        assert torch.equal(shard.position_ids[0, shard.rows], positions)
        assert torch.equal(shard.tokens[0, shard.rows], packed.tokens[0, packed.rows[shard.order]])


@given(LENGTHS.filter(bool), st.sampled_from([2, 4]))
@settings(max_examples=40, deadline=None)
def test_causal_work_is_equal_on_all_ranks(lengths, cp: int) -> None:
    packed = pack(sequences(lengths), pad_to_multiple=2 * cp, sequence_multiple=2 * cp)
    # A token at position p attends to p + 1 tokens.
    work = [int((context_shard(packed, cp, rank).position_ids + 1).sum()) for rank in range(cp)]
    assert len(set(work)) == 1


def test_attention_of_a_shard_over_all_keys_equals_the_whole() -> None:
    cp, width = 2, 8
    packed = pack(sequences([(5, 9), (3, 4)]), pad_to_multiple=2 * cp, sequence_multiple=2 * cp)
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(80, width, generator=generator)
    whole = attend(packed.tokens[0], packed.position_ids[0], packed.tokens[0], packed.position_ids[0], packed, table)
    for rank in range(cp):
        shard = context_shard(packed, cp, rank)
        part = attend(
            shard.tokens[0], shard.position_ids[0], packed.tokens[0], packed.position_ids[0], packed, table, cp
        )
        torch.testing.assert_close(part[shard.rows], whole[packed.rows[shard.order]])


def attend(tokens, positions, keys, key_positions, packed, table, cp: int = 1) -> torch.Tensor:
    """Causal attention of some tokens over all keys of their own sequence."""
    of_key = torch.repeat_interleave(torch.arange(len(packed.cu_seqlens) - 1), packed.cu_seqlens.diff())
    counts = packed.cu_seqlens.diff() // cp
    of_query = torch.repeat_interleave(torch.arange(len(counts)), counts)
    scores = table[tokens] @ table[keys].T
    visible = (of_query[:, None] == of_key[None]) & (key_positions[None] <= positions[:, None])
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ table[keys]


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    packed = pack(sequences([(3, 4)]))
    with pytest.raises(ValueError, match="7 tokens cannot be cut into 2 x 2"):
        context_shard(packed, 2, 0)
    with pytest.raises(ValueError, match="multiple of sequence_multiple"):
        pack(sequences([(3, 4)]), pad_to_multiple=2, sequence_multiple=4)
