"""Dynamic sampling: which groups are kept, and what happens when nearly none are."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from rollout_service.config import FilterGroupsSection
from rollout_service.filters import FilterExhausted, GroupFilter, Verdict
from rollout_service.sample import FinishReason, Group, Sample


def make_group(accs: list[float], rewards: list[float] | None = None, error: str | None = None) -> Group:
    rewards = rewards or [2 * acc - 1 for acc in accs]
    samples = [
        Sample(
            np.array([5], np.int32),
            np.zeros(1, np.float32),
            ((0, 1),),
            FinishReason.STOP,
            acc=acc,
            reward=reward,
            error=error,
        )
        for acc, reward in zip(accs, rewards, strict=True)
    ]
    return Group(0, "rows:1", 0, np.array([3], np.int32), "34", samples)


MIXED, RIGHT, WRONG = [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("accs", "verdict"),
    [
        (MIXED, Verdict.KEPT),
        (RIGHT, Verdict.SOLVE_ALL),
        (WRONG, Verdict.SOLVE_NONE),
        ([0.5, 0.5], Verdict.CONSTANT),
        ([0.5, 0.5 + 1e-9], Verdict.CONSTANT),
        ([0.1 + 0.2, 0.3], Verdict.CONSTANT),
        ([0.5, 0.6], Verdict.KEPT),
    ],
)
def test_verdict_by_scores(accs: list[float], verdict: Verdict) -> None:
    assert GroupFilter(FilterGroupsSection()).decide(make_group(accs)) is verdict


def test_overlong_shaping_does_not_save_an_all_wrong_group() -> None:
    group = make_group(WRONG, rewards=[-1.0, -1.5, -2.0])
    assert GroupFilter(FilterGroupsSection()).decide(group) is Verdict.SOLVE_NONE
    assert GroupFilter(FilterGroupsSection(metric="reward")).decide(group) is Verdict.KEPT


def test_a_disabled_filter_keeps_everything_and_still_counts() -> None:
    group_filter = GroupFilter(FilterGroupsSection(enable=False))
    assert [group_filter.decide(make_group(accs)) for accs in (WRONG, RIGHT, MIXED)] == [Verdict.KEPT] * 3
    stats = group_filter.stats()
    assert stats["training/filter_groups/solve_none"] == 1
    assert stats["training/filter_groups/solve_all"] == 1
    assert stats["training/filter_groups/kept"] == 1


def test_stats_are_reset_without_touching_the_window() -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=4))
    for accs in (WRONG, WRONG, RIGHT, MIXED):
        group_filter.decide(make_group(accs))
    assert group_filter.stats() == {
        "training/filter_groups/kept": 1.0,
        "training/filter_groups/solve_all": 1.0,
        "training/filter_groups/solve_none": 2.0,
        "training/filter_groups/constant": 0.0,
        "training/filter_groups/accepted": 0.0,
        "training/filter_groups/filtered_share": 0.75,
        "training/filter_groups/acc": pytest.approx((0 + 0 + 1 + 1 / 3) / 4),
    }
    group_filter.reset_stats()
    assert group_filter.stats()["training/filter_groups/solve_none"] == 0
    assert group_filter.filtered_share() == 0.75
    assert "training/filter_groups/acc" not in group_filter.stats()
    assert group_filter.totals() == {
        "training/filter_groups/kept": 1.0,
        "training/filter_groups/solve_all": 1.0,
        "training/filter_groups/solve_none": 2.0,
        "training/filter_groups/constant": 0.0,
        "training/filter_groups/accepted": 0.0,
    }


def test_keep_rate_starts_at_one_and_follows_the_window() -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=100))
    assert group_filter.keep_rate() == 1.0
    for _ in range(8):
        group_filter.decide(make_group(WRONG))
    assert group_filter.keep_rate() == 0.5  # eight kept ones were assumed beforehand
    for _ in range(200):
        group_filter.decide(make_group(WRONG))
    assert group_filter.keep_rate() == pytest.approx(8 / 108)
    for _ in range(100):
        group_filter.decide(make_group(MIXED))
    assert group_filter.keep_rate() == 1.0


def test_keep_rate_counts_what_the_policy_lets_through() -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=4, policy="accept"))
    for _ in range(20):
        group_filter.decide(make_group(WRONG))
    assert group_filter.filtered_share() == 1.0
    assert group_filter.keep_rate() == 1.0


def test_warn_logs_once_per_window_and_goes_on_filtering(caplog: pytest.LogCaptureFixture) -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=4, policy="warn"))
    with caplog.at_level(logging.WARNING):
        verdicts = [group_filter.decide(make_group(WRONG)) for _ in range(11)]
    assert verdicts == [Verdict.SOLVE_NONE] * 11
    assert len(caplog.records) == 2  # at groups 4 and 8
    assert "4 of the last 4 groups taught nothing: 4 all wrong, 0 all right" in caplog.text


def test_stop_raises_with_counts_and_advice_once_the_window_is_full() -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=4, max_filtered_share=0.75, policy="stop"))
    group_filter.decide(make_group(MIXED))
    group_filter.decide(make_group(RIGHT))
    group_filter.decide(make_group(WRONG))
    with pytest.raises(FilterExhausted, match=r"3 of the last 4 .*2 all wrong, 1 all right.*max_response_length"):
        group_filter.decide(make_group(WRONG))


def test_accept_lets_uninformative_groups_through_until_the_share_falls() -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=4, max_filtered_share=0.75, policy="accept"))
    assert [group_filter.decide(make_group(WRONG)) for _ in range(4)] == [Verdict.SOLVE_NONE] * 3 + [Verdict.KEPT]
    assert group_filter.decide(make_group(MIXED)) is Verdict.KEPT
    assert group_filter.decide(make_group(WRONG)) is Verdict.KEPT  # 3 of 4 are wrong
    assert group_filter.decide(make_group(MIXED)) is Verdict.KEPT
    assert group_filter.decide(make_group(WRONG)) is Verdict.SOLVE_NONE  # 2 of 4: filtering again
    assert group_filter.stats()["training/filter_groups/accepted"] == 2


@pytest.mark.parametrize("policy", ["warn", "accept", "stop"])
def test_a_window_that_is_not_full_never_acts(policy: str) -> None:
    group_filter = GroupFilter(FilterGroupsSection(window_groups=4, policy=policy))
    assert [group_filter.decide(make_group(WRONG)) for _ in range(3)] == [Verdict.SOLVE_NONE] * 3


def test_an_unscored_group_is_refused() -> None:
    with pytest.raises(ValueError, match="reward_timeout"):
        GroupFilter(FilterGroupsSection()).decide(make_group(MIXED, error="reward_timeout"))
    with pytest.raises(ValueError, match="not finite"):
        GroupFilter(FilterGroupsSection()).decide(make_group([float("nan"), 1.0]))
