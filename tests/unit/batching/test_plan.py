from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.batching import MiniBatch, estimated_cost, plan_step


@st.composite
def steps(draw: st.DrawFn) -> dict:
    samples, groups, mini_batches = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    n = samples * groups * mini_batches
    length = st.one_of(st.just(1), st.integers(1, 60), st.integers(200, 240))
    prompts = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    responses = draw(st.lists(length, min_size=n, max_size=n))
    longest = max(p + r for p, r in zip(prompts, responses, strict=True))
    return {
        "prompt_lengths": prompts,
        "response_lengths": responses,
        "groups_per_mini_batch": groups,
        "samples_per_group": samples,
        "dp_size": draw(st.integers(1, 5)),
        "max_tokens": longest + draw(st.integers(0, 600)),
    }


def rank_cost(mini_batch: MiniBatch, rank: int, lengths: list[int]) -> int:
    return sum(estimated_cost(lengths[s]) for b in mini_batch.micro_batches[rank] for s in b.samples)


@settings(max_examples=300, deadline=None)
@given(steps())
def test_every_rule_of_a_plan(step: dict) -> None:
    plan = plan_step(**step)
    lengths = [p + r for p, r in zip(step["prompt_lengths"], step["response_lengths"], strict=True)]
    size = step["groups_per_mini_batch"] * step["samples_per_group"]
    assert len(plan) * size == len(lengths)
    for index, mini_batch in enumerate(plan):
        ranks = mini_batch.micro_batches
        assert len(ranks) == step["dp_size"]
        assert len({len(rank) for rank in ranks}) == 1, "unequal micro-batch counts deadlock"
        # Exactly the samples of its own groups, each once.
        assert mini_batch.samples == list(range(index * size, (index + 1) * size))
        assert all(sum(lengths[s] for s in b.samples) <= step["max_tokens"] for rank in ranks for b in rank)
        # No micro-batch is empty on every rank, and empty ones come last.
        assert all(any(rank[i].samples for rank in ranks) for i in range(len(ranks[0])))
        for rank in ranks:
            filled = [bool(b.samples) for b in rank]
            assert filled == sorted(filled, reverse=True)
        # Greedy balance: two ranks differ by at most one sample's cost.
        costs = [rank_cost(mini_batch, r, lengths) for r in range(len(ranks))]
        assert max(costs) - min(costs) <= max(estimated_cost(lengths[s]) for s in mini_batch.samples)
    assert plan_step(**step) == plan, "same lengths, same plan"


def test_the_number_of_micro_batches_is_near_the_least_possible() -> None:
    lengths = [100, 90, 80, 70, 60, 50, 40, 30, 20, 10] * 4
    [mini_batch] = plan_step([1] * 40, [x - 1 for x in lengths], 10, 4, dp_size=2, max_tokens=220)
    assert len(mini_batch.micro_batches[0]) == 5  # 1100 tokens a rank, 220 a micro-batch


def test_long_and_short_responses_are_balanced_over_ranks() -> None:
    responses = [4000, 3500, 3000, 200, 150, 100, 90, 80, 70, 60, 50, 40, 4000, 3600, 2900, 30]
    plan = plan_step([50] * 16, responses, 2, 8, dp_size=2, max_tokens=8192)
    lengths = [50 + r for r in responses]
    costs = [rank_cost(plan[0], rank, lengths) for rank in (0, 1)]
    assert max(costs) / min(costs) < 1.05
    in_order = [sum(estimated_cost(x) for x in lengths[:8]), sum(estimated_cost(x) for x in lengths[8:])]
    assert max(costs) < max(in_order)


def test_micro_batches_of_a_rank_are_balanced_too() -> None:
    [mini_batch] = plan_step([1] * 12, [99] * 12, 3, 4, dp_size=1, max_tokens=500)  # 12 x 100 tokens: 3 micro-batches
    assert [len(b.samples) for b in mini_batch.micro_batches[0]] == [4, 4, 4]


def test_fewer_samples_than_ranks_gives_empty_micro_batches() -> None:
    [mini_batch] = plan_step([5, 5], [5, 9], 1, 2, dp_size=4, max_tokens=14)
    assert [[b.samples for b in rank] for rank in mini_batch.micro_batches] == [[[1]], [[0]], [[]], [[]]]


def test_a_tight_budget_falls_back_to_first_fit() -> None:
    # Balanced spreading of 6, 5, 4, 3, 2 over two bins of 10 ends with no room for the last one; first-fit packs it exactly.
    [mini_batch] = plan_step([1] * 5, [5, 4, 3, 2, 1], 1, 5, dp_size=1, max_tokens=10)
    assert [[[6, 5, 4, 3, 2][s] for s in b.samples] for b in mini_batch.micro_batches[0]] == [[6, 4], [5, 3, 2]]


def test_cost_grows_faster_than_length() -> None:
    assert estimated_cost(0) == 0 and estimated_cost(2000) > 2 * estimated_cost(1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 14}, r"sample 3 has 15 tokens.*trainer.max_tokens_per_gpu"),
        ({"samples_per_group": 3}, "4 samples do not split into mini-batches of 1 groups x 3 samples"),
        ({"prompt_lengths": [1]}, "1 prompt lengths but 4 response lengths"),
        ({"dp_size": 0}, "dp_size=0"),
    ],
)
def test_impossible_requests_are_named(change: dict, message: str) -> None:
    good = {
        "prompt_lengths": [5] * 4,
        "response_lengths": [1, 2, 3, 10],
        "groups_per_mini_batch": 1,
        "samples_per_group": 4,
        "dp_size": 1,
        "max_tokens": 100,
    }
    with pytest.raises(ValueError, match=message):
        plan_step(**{**good, **change})
