from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm import aggregate_loss, decoupled_clip_loss, importance_weights, token_weights
from dapo_megatron.algorithm.aggregate import AggregationMode
from tests.unit.algorithm import reference

MODES = get_args(AggregationMode)
LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 12)), min_size=1, max_size=16)


def weights(mode: str, lengths: list[int], groups: list[int], longest: int = 12) -> torch.Tensor:
    return token_weights(mode, torch.tensor(lengths), torch.tensor(groups), longest)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.sampled_from(MODES), st.lists(st.integers(0, 12), min_size=1, max_size=16), st.data())
def test_weighted_sum_equals_the_reference_aggregation(mode: str, lengths: list[int], data) -> None:
    groups = data.draw(st.lists(st.sampled_from([0, 3, 7]), min_size=len(lengths), max_size=len(lengths)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    losses = [rng.normal(size=n) for n in lengths]
    token_loss = torch.tensor(np.concatenate([np.zeros(0), *losses]))
    index = torch.tensor(np.repeat(np.arange(len(lengths)), lengths))
    got = aggregate_loss(token_loss, weights(mode, lengths, groups), index)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(reference.mini_batch_loss(losses, groups, mode, 12), rel=1e-12, abs=1e-14)


@settings(deadline=None)
@given(st.sampled_from(MODES), LENGTHS, st.randoms())
def test_weights_do_not_depend_on_the_order_of_samples(mode: str, lengths: list[int], random) -> None:
    groups = [random.randrange(4) for _ in lengths]
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = weights(mode, [lengths[i] for i in order], [groups[i] for i in order])
    assert torch.equal(weights(mode, lengths, groups)[order], shuffled)


@settings(deadline=None)
@given(LENGTHS)
def test_constant_loss_of_one_aggregates_to_one(lengths: list[int]) -> None:
    groups = [i // 2 for i in range(len(lengths))]
    for mode in ("token-mean", "group-token-mean", "seq-mean-token-mean"):
        assert float((weights(mode, lengths, groups) * torch.tensor(lengths)).sum()) == pytest.approx(1.0, rel=1e-12)


def test_each_mode_on_a_small_example() -> None:
    lengths, groups = [1, 3, 4], [0, 0, 1]
    assert weights("token-mean", lengths, groups).tolist() == [1 / 8] * 3
    assert weights("group-token-mean", lengths, groups).tolist() == [1 / 8, 1 / 8, 1 / 8]
    assert weights("group-token-mean", [1, 3, 2], groups).tolist() == [1 / 8, 1 / 8, 1 / 4]
    assert weights("seq-mean-token-mean", lengths, groups).tolist() == pytest.approx([1 / 3, 1 / 9, 1 / 12])
    assert weights("seq-mean-token-sum", lengths, groups).tolist() == [1 / 3] * 3
    assert weights("seq-mean-token-sum-norm", lengths, groups, 10).tolist() == pytest.approx([1 / 30] * 3)


def test_samples_without_tokens_do_not_count() -> None:
    for mode in MODES:
        assert weights(mode, [2, 0, 3], [0, 0, 1]).tolist()[1] == 0.0
        assert torch.equal(weights(mode, [2, 0, 3], [0, 0, 1])[[0, 2]], weights(mode, [2, 3], [0, 1]))
        assert weights(mode, [0, 0], [0, 1]).tolist() == [0.0, 0.0]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown aggregation mode 'mean'"):
        weights("mean", [1], [0])
    with pytest.raises(ValueError, match="response length -1"):
        weights("token-mean", [-1], [0])
    with pytest.raises(ValueError, match="must both be"):
        weights("token-mean", [1, 2], [0])
    with pytest.raises(ValueError, match="sample_index"):
        aggregate_loss(torch.zeros(2), torch.ones(1, dtype=torch.float64), torch.zeros(3, dtype=torch.long))


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS, st.sampled_from(MODES), st.sampled_from(["token", "sequence", "off"]), st.integers(0, 2**32 - 1), st.data()
)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(lengths, mode, level, seed, data) -> None:
    rng = np.random.default_rng(seed)
    n = len(lengths)
    index = torch.tensor(np.repeat(np.arange(n), lengths))
    total = len(index)
    old = torch.tensor(rng.uniform(-8, 0, total))
    behaviour = old + torch.tensor(rng.normal(0, 0.3, total))
    logprobs = old + torch.tensor(rng.normal(0, 0.4, total))
    advantages = torch.tensor(rng.normal(size=n))[index]
    sample_weights = weights(mode, lengths, [i // 3 for i in range(n)])

    def run(micro_batches: list[list[int]]) -> tuple[float, torch.Tensor]:
        x = logprobs.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for samples in micro_batches:
            rows = torch.cat(
                [torch.zeros(0, dtype=torch.long), *[torch.nonzero(index == s).flatten() for s in samples]]
            )
            mask = torch.ones(len(rows), dtype=torch.bool)
            correction = importance_weights(old[rows], behaviour[rows], mask, index[rows], level, 2.0)
            out = decoupled_clip_loss(x[rows], old[rows], advantages[rows], mask, 0.2, 0.28, 10.0, correction.weights)
            part = aggregate_loss(out.token_loss, sample_weights, index[rows])
            part.backward()
            loss = loss + part.detach()
        assert x.grad is not None
        return loss.item(), x.grad

    loss, gradient = run([list(range(n))])
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))
    split = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]  # some may be empty
    loss_split, gradient_split = run(split)
    assert loss_split == pytest.approx(loss, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradient_split, gradient, rtol=1e-12, atol=1e-12)
