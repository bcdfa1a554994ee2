"""Soft overlong punishment and the shaped reward, by numbers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rollout_service.config import OverlongBufferSection, RewardSection, RolloutSection
from rollout_service.rewards import Score
from rollout_service.rewards.overlong import overlong_penalty, shape_reward


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1.0), (30000, -1.0)],
)
def test_the_papers_numbers(length: int, expected: float) -> None:
    assert overlong_penalty(length, 20480, OverlongBufferSection(enable=True, len=4096)) == pytest.approx(expected)


def test_a_response_of_exactly_the_limit_gets_exactly_minus_the_factor() -> None:
    assert overlong_penalty(64, 64, OverlongBufferSection(enable=True, len=7, penalty_factor=0.3)) == -0.3


def test_a_buffer_as_long_as_the_limit_punishes_linearly_from_the_first_token() -> None:
    buffer = OverlongBufferSection(enable=True, len=64)
    assert [overlong_penalty(n, 64, buffer) for n in (0, 1, 32, 64)] == [0.0, -1 / 64, -0.5, -1.0]


def test_a_factor_of_zero_changes_nothing() -> None:
    assert overlong_penalty(64, 64, OverlongBufferSection(enable=True, len=8, penalty_factor=0.0)) == 0.0


@pytest.mark.parametrize("length", [1, 64, 1000])
def test_a_disabled_buffer_of_any_length_never_punishes_nor_divides_by_zero(length: int) -> None:
    assert overlong_penalty(length, 64, OverlongBufferSection(enable=False, len=0)) == 0.0
    assert overlong_penalty(length, 64, OverlongBufferSection(enable=False, len=100)) == 0.0


def test_impossible_buffers_are_refused_by_the_configuration() -> None:
    with pytest.raises(ValidationError, match=r"overlong_buffer.len=0"):
        RolloutSection(max_response_length=64, overlong_buffer=OverlongBufferSection(enable=True, len=0))
    with pytest.raises(ValidationError, match=r"overlong_buffer.len=65"):
        RolloutSection(max_response_length=64, overlong_buffer=OverlongBufferSection(enable=True, len=65))


@pytest.mark.parametrize(
    ("acc", "length", "reward"), [(1.0, 10, 1.0), (0.0, 10, -1.0), (1.0, 64, 0.0), (0.0, 64, -2.0), (0.0, 56, -1.5)]
)
def test_shaped_reward_is_the_verdict_plus_the_punishment(acc: float, length: int, reward: float) -> None:
    rollout = RolloutSection(max_response_length=64, overlong_buffer=OverlongBufferSection(enable=True, len=16))
    shaped, details = shape_reward(Score(acc, "34"), length, rollout)
    assert shaped == reward
    assert details["acc_reward"] + details["overlong_penalty"] == reward


def test_reward_values_come_from_the_configuration() -> None:
    rollout = RolloutSection(reward=RewardSection(correct=0.1, incorrect=-0.3))
    assert shape_reward(Score(1.0, "1"), 5, rollout)[0] == 0.1
    assert shape_reward(Score(0.0, "1"), 5, rollout)[0] == -0.3


def test_a_sample_that_was_not_scored_has_no_reward() -> None:
    with pytest.raises(ValueError, match="reward_timeout"):
        shape_reward(Score(0.0, None, "reward_timeout"), 5, RolloutSection())
