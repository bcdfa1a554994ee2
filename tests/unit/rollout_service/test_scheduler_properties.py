"""The scheduler's promises under any order of events: the staleness bound, exact batches, nothing lost, no deadlock; and
over-sampling gives up only groups that were admitted beyond the slots.

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
        oversampling=st.one_of(st.just(1.0), st.floats(1.0, 5.0)),
    )
    def build(self, prompts: int, staleness: int, fraction: float, version: int, oversampling: float) -> None:
        self.settings = (prompts, staleness, fraction, 0, oversampling)
        self.scheduler = Scheduler(prompts, staleness, fraction, version, oversampling)
        self.most_alive = math.floor(oversampling * self.scheduler.slots + 1e-9)
        self.prompts = prompts
        window = max(1, math.floor(fraction * (staleness + 1) * prompts + 1e-9))
        self.bound = staleness + math.ceil((window - 1) / prompts)
        self.version = version
        self.step = 10
        self.born: dict[int, int] = {}
        self.running: list[int] = []
        self.finished: set[int] = set()
        self.dropped: set[int] = set()
        self.given_up: set[int] = set()
        self.guaranteed: set[int] = set()  # admitted while fewer than B others were alive
        self.taken: dict[int, list[int]] = {}
        self.trained: list[int] = []

    def group(self, order: int) -> Group:
        sample = Sample(np.array([5], np.int32), np.zeros(1, np.float32), ((self.born[order], 1),), FinishReason.STOP)
        return Group(order, f"rows:{order}", 0, np.array([3], np.int32), "34", [sample])

    def alive(self) -> int:
        return len(self.born) - len(self.trained) - len(self.dropped) - len(self.given_up)

    def hand_in(self, order: int) -> None:
        self.scheduler.finish(order, self.group(order))
        self.finished.add(order)
        self.collect()

    def collect(self) -> None:
        for order, group in self.scheduler.collect_surplus():
            assert order not in self.guaranteed
            assert (group is not None) == (order in self.finished)
            if group is None:
                self.running.remove(order)
            else:
                assert group.order == order
            self.given_up.add(order)

    @precondition(lambda self: self.scheduler.free_slots() > 0)
    @rule(amount=st.integers(1, 20), keep_rate=st.floats(0.01, 1.0))
    def admit(self, amount: int, keep_rate: float) -> None:
        free = self.scheduler.free_slots(keep_rate)
        assert free >= self.scheduler.free_slots() == self.scheduler.slots - self.alive()
        for _ in range(min(amount, free)):
            guaranteed = self.alive() < self.scheduler.slots
            order = self.scheduler.admit(keep_rate)
            assert order not in self.born
            if guaranteed:
                self.guaranteed.add(order)
            self.born[order] = self.version
            self.running.append(order)
        assert self.alive() <= self.most_alive

    @precondition(lambda self: self.alive() >= self.scheduler.slots)
    @rule(amount=st.integers(1, 20), keep_rate=st.floats(0.01, 1.0))
    def run_ahead(self, amount: int, keep_rate: float) -> None:
        for _ in range(min(amount, self.scheduler.free_slots(keep_rate))):
            order = self.scheduler.admit(keep_rate)
            self.born[order] = self.version
            self.running.append(order)
        assert self.alive() <= self.most_alive

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.running))
        self.running.remove(order)
        self.hand_in(order)

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def finish_all_but_the_oldest(self) -> None:
        for order in reversed(self.running[1:]):
            if order in self.running:  # not given up meanwhile
                self.running.remove(order)
                self.hand_in(order)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.running))
        self.running.remove(order)
        self.dropped.add(order)
        alive = self.alive()
        self.scheduler.drop(order)
        self.collect()
        assert self.scheduler.free_slots() >= min(1, self.scheduler.slots - alive)

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
        self.collect()

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
        assert sum(counts[part] for part in parts) == self.scheduler.slots + counts["extra"]
        assert counts["running"] == len(self.running)
        assert counts["in_training"] == sum(map(len, self.taken.values()))
        assert self.alive() == self.scheduler.slots - counts["free"] + counts["extra"]
        assert self.most_alive > self.scheduler.slots or not self.given_up
        assert self.scheduler.version == self.version

    @invariant()
    def nothing_is_trained_twice_or_after_a_drop(self) -> None:
        used = self.trained + [order for batch in self.taken.values() for order in batch]
        assert len(used) == len(set(used))
        assert not set(used) & (self.dropped | self.given_up)

    @invariant()
    def no_deadlock(self) -> None:
        if not self.running and not self.taken:
            assert self.scheduler.batch_ready() or self.scheduler.free_slots() > 0

    def teardown(self) -> None:
        """Whatever happened, finishing what runs and training on lets every admitted group reach the trainer."""
        if not hasattr(self, "scheduler"):
            return
        while self.running:
            self.hand_in(self.running.pop())
        while self.taken or self.scheduler.batch_ready():
            if self.scheduler.batch_ready():
                self.take(1)
            self.train()
        left = set(self.born) - set(self.trained) - self.dropped - self.given_up
        assert len(left) == self.scheduler.counts()["ready"] < self.prompts


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSchedulerProperties = SchedulerMachine.TestCase
