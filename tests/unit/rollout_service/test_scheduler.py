"""Admission accounting, the window, idempotence and resume of the scheduler, by small examples."""

from __future__ import annotations

import pickle
from random import Random

import numpy as np
import pytest

from rollout_service.sample import FinishReason, Group, Sample
from rollout_service.scheduler import Scheduler, StalenessViolation


def make_group(order: int, version: int = 0, error: str | None = None) -> Group:
    sample = Sample(np.array([5], np.int32), np.zeros(1, np.float32), ((version, 1),), FinishReason.STOP, error=error)
    return Group(order, f"rows:{order}", 0, np.array([3, 4], np.int32), "34", [sample, sample])


def orders(batch: list[Group]) -> list[int]:
    return [group.order for group in batch]


def finish(scheduler: Scheduler, *which: int) -> None:
    for order in which:
        scheduler.finish(order, make_group(order, scheduler.admitted_version(order)))


@pytest.mark.parametrize(
    ("prompts", "staleness", "fraction", "slots", "window", "bound"),
    [
        (512, 1, 0.0, 1024, 1, 1),
        (2, 0, 0.0, 2, 1, 0),
        (2, 1, 0.5, 4, 2, 2),
        (2, 1, 1.0, 4, 4, 3),
        (3, 2, 0.4, 9, 3, 3),
        (50, 1, 0.29, 100, 29, 2),  # 0.29 * 100 is 28.999999999999996 in floating point
    ],
)
def test_slots_window_and_bound(
    prompts: int, staleness: int, fraction: float, slots: int, window: int, bound: int
) -> None:
    scheduler = Scheduler(prompts, staleness, fraction)
    assert (scheduler.slots, scheduler.window, scheduler.bound) == (slots, window, bound)


def test_a_slot_is_held_until_the_group_is_trained_not_until_it_finishes() -> None:
    scheduler = Scheduler(2, 0, 0.0)
    assert [scheduler.admit(), scheduler.admit()] == [0, 1]
    finish(scheduler, 0, 1)
    assert scheduler.free_slots() == 0
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        scheduler.admit()
    assert orders(scheduler.take(1)) == [0, 1]
    assert scheduler.free_slots() == 0
    scheduler.trained(1, 1)
    assert scheduler.free_slots() == 2
    assert scheduler.version == 1


def test_a_dropped_group_frees_its_slot_at_once_and_its_successor_fills_the_batch() -> None:
    scheduler = Scheduler(2, 0, 0.0)
    scheduler.admit(), scheduler.admit()
    finish(scheduler, 1)
    assert not scheduler.batch_ready()
    scheduler.drop(0)
    assert scheduler.counts() == {
        "running": 0,
        "finished": 1,
        "waiting": 0,
        "ready": 1,
        "in_training": 0,
        "free": 1,
        "extra": 0,
    }
    assert scheduler.admit() == 2
    finish(scheduler, 2)
    assert orders(scheduler.take(7)) == [1, 2]


def test_without_a_window_a_slow_group_holds_back_all_younger_ones() -> None:
    scheduler = Scheduler(2, 1, 0.0)
    for _ in range(4):
        scheduler.admit()
    finish(scheduler, 1, 2, 3)
    assert not scheduler.batch_ready()
    finish(scheduler, 0)
    assert orders(scheduler.take(1)) == [0, 1]
    assert orders(scheduler.take(2)) == [2, 3]


def test_the_window_lets_a_younger_group_pass_but_not_one_beyond_it() -> None:
    scheduler = Scheduler(2, 1, 0.75)
    assert scheduler.window == 3
    for _ in range(4):
        scheduler.admit()
    finish(scheduler, 3)  # 3 is not below 0 + 3
    assert scheduler.counts()["waiting"] == 1
    finish(scheduler, 2)
    assert scheduler.counts()["ready"] == 1
    finish(scheduler, 1)
    assert orders(scheduler.take(1)) == [2, 1]


def test_the_window_is_anchored_at_order_numbers_so_drops_do_not_widen_it() -> None:
    scheduler = Scheduler(2, 1, 0.5)
    assert scheduler.window == 2
    for _ in range(4):
        scheduler.admit()
    scheduler.drop(1)
    finish(scheduler, 2)  # second oldest live group, but order 2 is not below 0 + 2
    assert scheduler.counts()["waiting"] == 1


def test_take_is_idempotent_until_the_step_is_trained() -> None:
    scheduler = Scheduler(2, 1, 0.0)
    for _ in range(4):
        scheduler.admit()
    finish(scheduler, 0, 1, 2, 3)
    first = scheduler.take(5)
    assert scheduler.take(5) == first
    scheduler.trained(5, 1)
    scheduler.trained(5, 1)  # a repeated call changes nothing
    assert scheduler.version == 1
    with pytest.raises(RuntimeError, match="step 5 asks for a batch after step 5"):
        scheduler.take(5)


def test_finishing_twice_or_after_a_drop_is_an_error() -> None:
    scheduler = Scheduler(2, 1, 0.0)
    scheduler.admit(), scheduler.admit()
    finish(scheduler, 0)
    with pytest.raises(RuntimeError, match="group 0 is not running"):
        finish(scheduler, 0)
    scheduler.drop(1)
    with pytest.raises(RuntimeError, match="group 1 is not running"):
        scheduler.drop(1)


def test_a_group_of_another_order_or_with_an_unscored_sample_is_refused() -> None:
    scheduler = Scheduler(2, 0, 0.0)
    scheduler.admit()
    with pytest.raises(ValueError, match="has order 1, not 0"):
        scheduler.finish(0, make_group(1))
    with pytest.raises(ValueError, match="reward_timeout"):
        scheduler.finish(0, make_group(0, error="reward_timeout"))
    assert scheduler.running_orders() == [0]


def test_steps_are_trained_in_the_order_in_which_they_were_taken_and_versions_grow_by_one() -> None:
    scheduler = Scheduler(1, 1, 0.0)
    scheduler.admit(), scheduler.admit()
    finish(scheduler, 0, 1)
    scheduler.take(1), scheduler.take(2)
    with pytest.raises(RuntimeError, match="step 2 cannot be trained now: the step in training is 1"):
        scheduler.trained(2, 1)
    with pytest.raises(RuntimeError, match="publishes version 2 after 0"):
        scheduler.trained(1, 2)
    scheduler.trained(1, 1)
    scheduler.trained(2, 2)


def test_tokens_of_a_version_below_the_bound_are_a_violation_that_names_the_group() -> None:
    scheduler = Scheduler(1, 0, 0.0, version=9)
    order = scheduler.admit()
    scheduler.finish(order, make_group(order, version=4))
    with pytest.raises(StalenessViolation, match=r"group 0 \(rows:0\) .* version 4: age 5 is above the bound 0"):
        scheduler.take(1)


def test_resume_keeps_every_group_and_the_order() -> None:
    scheduler = Scheduler(2, 1, 0.0, version=3)
    for _ in range(4):
        scheduler.admit()
    finish(scheduler, 0, 1, 3)
    taken = orders(scheduler.take(11))
    restored = Scheduler(2, 1, 0.0)
    restored.load_state_dict(pickle.loads(pickle.dumps(scheduler.state_dict())))
    assert restored.counts() == scheduler.counts()
    assert restored.running_orders() == [2]
    assert orders(restored.take(11)) == taken == [0, 1]
    restored.trained(11, 4)
    finish(restored, 2)
    assert orders(restored.take(12)) == [2, 3]
    assert restored.admit() == 4


def test_resume_with_other_queue_settings_is_refused_by_key() -> None:
    state = Scheduler(2, 1, 0.0).state_dict()
    with pytest.raises(ValueError, match="resume with the rollout.max_staleness"):
        Scheduler(2, 2, 0.0).load_state_dict(state)
    with pytest.raises(ValueError, match="rollout.window_fraction"):
        Scheduler(2, 1, 1.0).load_state_dict(state)


def oldest_age(prompts: int, staleness: int, fraction: float, seed: int, steps: int = 30) -> int:
    """Greatest age in a run whose latencies are chosen at random, in favour of passing."""
    rng = Random(seed)
    scheduler, admitted, worst, step = Scheduler(prompts, staleness, fraction), {}, 0, 0
    while step < steps:
        while scheduler.free_slots():
            admitted[scheduler.admit()] = scheduler.version
        running = scheduler.running_orders()
        if running and not (scheduler.batch_ready() and rng.random() < 0.5):
            finish(scheduler, running[-1] if rng.random() < 0.6 else rng.choice(running))
        elif scheduler.batch_ready():
            step += 1
            batch = scheduler.take(step)
            worst = max(worst, *(scheduler.version - admitted[group.order] for group in batch))
            scheduler.trained(step, scheduler.version + 1)
    return worst


@pytest.mark.parametrize(
    ("prompts", "staleness", "fraction"),
    [(2, 0, 0.0), (2, 1, 0.0), (2, 1, 0.75), (2, 1, 1.0), (3, 2, 0.45), (1, 2, 1.0)],
)
def test_the_bound_is_reached_and_never_passed(prompts: int, staleness: int, fraction: float) -> None:
    bound = Scheduler(prompts, staleness, fraction).bound
    assert max(oldest_age(prompts, staleness, fraction, seed) for seed in range(60)) == bound
