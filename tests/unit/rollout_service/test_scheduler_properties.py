"""The scheduler's promises under any order of events: the staleness bound, exact batches, nothing lost, no deadlock.

The machine keeps its own book of what was admitted, dropped and trained, and never asks the scheduler about it.
"""

from __future__ import annotations

import math
import pickle

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_service.sample import FinishReason, Group, Sample
from rollout_service.scheduler import Scheduler


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        prompts=st.integers(1, 5),
        staleness=st.integers(0, 3),
        fraction=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
        version=st.integers(0, 3),
    )
    def build(self, prompts: int, staleness: int, fraction: float, version: int) -> None:
        self.settings = (prompts, staleness, fraction)
        self.scheduler = Scheduler(prompts, staleness, fraction, version)
        self.prompts = prompts
        window = max(1, math.floor(fraction * (staleness + 1) * prompts + 1e-9))
        self.bound = staleness + math.ceil((window - 1) / prompts)
        self.version = version
        self.step = 10
        self.born: dict[int, int] = {}
        self.running: list[int] = []
        self.dropped: set[int] = set()
        self.taken: dict[int, list[int]] = {}
        self.trained: list[int] = []

    def group(self, order: int) -> Group:
        sample = Sample(np.array([5], np.int32), np.zeros(1, np.float32), ((self.born[order], 1),), FinishReason.STOP)
        return Group(order, f"rows:{order}", 0, np.array([3], np.int32), "34", [sample])

    @precondition(lambda self: self.scheduler.free_slots() > 0)
    @rule(amount=st.integers(1, 20))
    def admit(self, amount: int) -> None:
        for _ in range(min(amount, self.scheduler.free_slots())):
            order = self.scheduler.admit()
            assert order not in self.born
            self.born[order] = self.version
            self.running.append(order)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.running))
        self.running.remove(order)
        self.scheduler.finish(order, self.group(order))

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def finish_all_but_the_oldest(self) -> None:
        for order in reversed(self.running[1:]):
            self.scheduler.finish(order, self.group(order))
        del self.running[1:]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.running))
        self.running.remove(order)
        self.dropped.add(order)
        free = self.scheduler.free_slots()
        self.scheduler.drop(order)
        assert self.scheduler.free_slots() == free + 1

    @precondition(lambda self: self.scheduler.batch_ready())
    @rule(skipped_steps=st.integers(1, 3))
    def take(self, skipped_steps: int) -> None:
        self.step += skipped_steps
        batch = [group.order for group in self.scheduler.take(self.step)]
        assert len(batch) == self.prompts
        trained_at = self.version + len(self.taken)
        for order in batch:
            assert trained_at - self.born[order] <= self.bound
        self.taken[self.step] = batch
        assert [group.order for group in self.scheduler.take(self.step)] == batch

    @precondition(lambda self: self.taken)
    @rule()
    def train(self) -> None:
        step = min(self.taken)
        self.version += 1
        self.scheduler.trained(step, self.version)
        self.trained += self.taken.pop(step)

    @rule()
    def crash_and_resume(self) -> None:
        state = pickle.loads(pickle.dumps(self.scheduler.state_dict()))
        self.scheduler = Scheduler(*self.settings)
        self.scheduler.load_state_dict(state)
        assert self.scheduler.running_orders() == self.running

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        counts = self.scheduler.counts()
        parts = ("running", "waiting", "ready", "in_training", "free")
        assert sum(counts[part] for part in parts) == self.scheduler.slots
        assert counts["running"] == len(self.running)
        assert counts["in_training"] == sum(map(len, self.taken.values()))
        gone = len(self.trained) + len(self.dropped)
        assert len(self.born) - gone == self.scheduler.slots - counts["free"]
        assert self.scheduler.version == self.version

    @invariant()
    def nothing_is_trained_twice_or_after_a_drop(self) -> None:
        used = self.trained + [order for batch in self.taken.values() for order in batch]
        assert len(used) == len(set(used))
        assert not set(used) & self.dropped

    @invariant()
    def no_deadlock(self) -> None:
        if not self.running and not self.taken:
            assert self.scheduler.batch_ready() or self.scheduler.free_slots() > 0

    def teardown(self) -> None:
        """Whatever happened, finishing what runs and training on lets every admitted group reach the trainer."""
        if not hasattr(self, "scheduler"):
            return
        while self.running:
            order = self.running.pop()
            self.scheduler.finish(order, self.group(order))
        while self.taken or self.scheduler.batch_ready():
            if self.scheduler.batch_ready():
                self.take(1)
            self.train()
        left = set(self.born) - set(self.trained) - self.dropped
        assert len(left) == self.scheduler.counts()["ready"] < self.prompts


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerProperties = SchedulerMachine.TestCase
