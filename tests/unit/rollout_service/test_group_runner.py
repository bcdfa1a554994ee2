"""A group is completed or fails with its causes; a fault never becomes a wrong answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_service.config import SamplingSection
from rollout_service.engine import Completion, EngineError
from rollout_service.evaluation import evaluation_metrics
from rollout_service.group_runner import GroupFailed, GroupRunner, sampling_parameters, sampling_seed
from rollout_service.prompts import Prompt
from rollout_service.rewards import Item, Score
from rollout_service.sample import FinishReason, Group, GroupMeta, Sample
from tests.service_settings import service_settings


class PlainFleet:
    version = 4

    def __init__(self, faults: dict[str, list[Exception | FinishReason]]) -> None:
        self.faults = faults
        self.requests: list[tuple[str, dict[str, Any]]] = []

    async def generate(
        self,
        ids: list[int],
        sampling: dict[str, Any],
        rid: str,
        priority: tuple[int, ...],
        routed_experts: bool = False,
    ) -> Any:
        self.requests.append((rid, sampling))
        index = rid.rsplit("-", 1)[1]
        fault = self.faults[index].pop(0) if self.faults.get(index) else FinishReason.STOP
        if isinstance(fault, Exception):
            raise fault
        n = 2 + int(index)
        return Completion(np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.float32), ((4, n),), fault)


class PlainRewards:
    last_fault = "my.rule: too slow"

    def __init__(self, errors: list[str | None], per_group: bool = False) -> None:
        self.errors = errors
        self.per_group = per_group
        self.calls: list[list[Item]] = []

    @property
    def asked(self) -> int:
        return len(self.calls)

    async def score_group(self, items: list[Item]) -> list[Score]:
        self.calls.append(items)
        errors = [self.errors.pop(0) if self.errors else None for _ in items]
        return [Score(0.0 if error else 1.0, None, error, {"my:style": 0.25}) for error in errors]


def run_group(
    tmp_path: Path,
    faults: dict[str, list[Exception | FinishReason]],
    errors: list[str | None],
    per_group: bool = False,
) -> tuple[Group, PlainFleet, PlainRewards, GroupRunner]:
    settings = service_settings(tmp_path, tmp_path, rollout={"max_group_attempts": 2})
    fleet, rewards = PlainFleet(faults), PlainRewards(errors, per_group)
    runner = GroupRunner(
        settings.rollout,
        fleet,  # type: ignore[arg-type]
        rewards,  # type: ignore[arg-type]
        decode=lambda ids: "x" * len(ids),
        stop_token_ids=[2, 5],
        seed=7,
    )
    prompt = Prompt("train:1", 0, "1+6=", np.array([8, 9], dtype=np.int32), "7")
    group = asyncio.run(runner.run_training_group(3, prompt))
    return group, fleet, rewards, runner


def test_group_is_complete_and_carries_its_prompt(tmp_path: Path) -> None:
    group, fleet, _, runner = run_group(tmp_path, {}, [])
    assert (group.order, group.prompt_id, group.answer, group.attempt, group.admitted_version) == (
        3,
        "train:1",
        "7",
        1,
        4,
    )
    assert [len(sample.response_ids) for sample in group.samples] == [2, 3, 4]
    assert [sample.reward for sample in group.samples] == [1.25, 1.25, 1.25]
    assert all(set(sample.timings) == {"generate", "reward"} for sample in group.samples)
    assert len({params["sampling_seed"] for _, params in fleet.requests}) == 3
    assert fleet.requests[0][1]["stop_token_ids"] == [2, 5]
    assert runner.counters.samples == 3
    assert runner.counters.tokens == 9


def test_only_the_failed_sample_is_generated_again(tmp_path: Path) -> None:
    group, fleet, _, runner = run_group(tmp_path, {"1": [EngineError("engine 0: 4 ids, 5 log-probs")]}, [])
    assert [rid for rid, _ in fleet.requests] == ["group-3-1-0", "group-3-1-1", "group-3-1-2", "group-3-2-1"]
    assert group.attempt == 2
    assert len(group.samples) == 3
    assert runner.counters.retried_samples == 1
    assert runner.counters.faults == {"engine": 1}


def test_aborted_sample_is_generated_again(tmp_path: Path) -> None:
    group, _, _, runner = run_group(tmp_path, {"0": [FinishReason.ABORT]}, [])
    assert all(sample.finish_reason is FinishReason.STOP for sample in group.samples)
    assert runner.counters.faults == {"abort": 1}


def test_unscored_sample_is_scored_again_and_then_generated_again(tmp_path: Path) -> None:
    _, fleet, rewards, runner = run_group(tmp_path, {}, ["reward_crash"])
    assert (len(fleet.requests), rewards.asked) == (3, 4)
    assert runner.counters.faults == {}
    group, fleet, _, runner = run_group(tmp_path, {"1": [], "2": []}, ["reward_timeout"] * 4)
    assert len(fleet.requests) > 3
    assert all(sample.acc == 1.0 and sample.error is None for sample in group.samples)
    assert set(runner.counters.faults) == {"reward_timeout"}


def test_rules_get_the_prompt_and_the_parts_of_a_reward_travel_with_the_ticket(tmp_path: Path) -> None:
    group, _, rewards, _ = run_group(tmp_path, {}, [])
    assert rewards.calls[0] == [Item("7", "xx", False, "1+6=")]
    meta = GroupMeta.of(group)
    parts = {name: values.tolist() for name, values in meta.reward_parts.items()}
    assert parts == {"acc_reward": [1.0] * 3, "overlong_penalty": [0.0] * 3, "my:style": [0.25] * 3}
    assert meta.acc.tolist() == [1.0] * 3 and meta.rewards.tolist() == [1.25] * 3


def test_a_rule_for_groups_sees_a_group_only_when_it_is_complete(tmp_path: Path) -> None:
    faults: dict[str, list[Exception | FinishReason]] = {"1": [EngineError("engine 0 refused")]}
    group, fleet, rewards, runner = run_group(tmp_path, faults, [], per_group=True)
    assert [[item.response for item in call] for call in rewards.calls] == [["xx", "xxx", "xxxx"]]
    assert (len(fleet.requests), group.attempt, runner.counters.samples) == (4, 2, 3)
    assert all(set(sample.timings) == {"generate", "reward"} for sample in group.samples)


def test_a_group_without_verdict_is_asked_about_again_and_its_failed_samples_generated_again(tmp_path: Path) -> None:
    errors = [None, "reward_crash", None] * 2
    group, fleet, rewards, runner = run_group(tmp_path, {}, list(errors), per_group=True)
    assert [len(call) for call in rewards.calls] == [3, 3, 3]
    assert [rid for rid, _ in fleet.requests][3:] == ["group-3-2-1"]
    assert runner.counters.faults == {"reward_crash": 1}
    assert [sample.acc for sample in group.samples] == [1.0] * 3


def test_group_out_of_attempts_fails_and_names_prompt_and_causes(tmp_path: Path) -> None:
    faults: dict[str, list[Exception | FinishReason]] = {"2": [EngineError("engine 0 refused"), FinishReason.ABORT]}
    with pytest.raises(
        GroupFailed, match=r"prompt 'train:1' \(epoch 0.*1 of 3 samples.*2 attempts.*engine 0 refused; "
    ):
        run_group(tmp_path, faults, [])
    with pytest.raises(GroupFailed, match="reward_timeout on a response that ends 'xx'"):
        run_group(tmp_path, {}, ["reward_timeout"] * 99)


def test_sampling_parameters_spell_greedy_as_temperature_zero() -> None:
    params = sampling_parameters(SamplingSection(temperature=0.0), 24, [2])
    assert params == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 24,
        "stop_token_ids": [2],
    }


def test_sampling_seed_depends_on_every_part_and_on_nothing_else() -> None:
    assert sampling_seed(7, "group-3", 1, 0) == sampling_seed(7, "group-3", 1, 0)
    seeds = {sampling_seed(s, f"group-{g}", a, i) for s in (1, 2) for g in range(3) for a in (1, 2) for i in range(4)}
    assert len(seeds) == 48
    assert all(0 <= seed < 2**31 for seed in seeds)


def sample(acc: float, length: int, reason: FinishReason = FinishReason.STOP) -> Sample:
    return Sample(np.zeros(length, np.int32), np.zeros(length, np.float32), ((0, length),), reason, acc=acc)


def test_evaluation_metrics() -> None:
    groups = [
        [sample(1.0, 4), sample(0.0, 8, FinishReason.LENGTH)],
        [sample(0.0, 2), sample(0.0, 2)],
        [sample(1.0, 3), sample(1.0, 5)],
    ]
    assert evaluation_metrics(groups) == pytest.approx(
        {
            "acc": 0.5,
            "prompts": 3,
            "n": 2,
            "acc/mean@2": 0.5,
            "acc/best@2": 2 / 3,
            "response_length/mean": 4.0,
            "response_length/max": 8,
            "truncated_share": 1 / 6,
        }
    )
