"""Admission accounting and the windowed FIFO: which prompts may run, and which groups make up a batch.

Pure bookkeeping, without clock and without I/O. A group lives through

    admit() -> running --finish()--> waiting --window--> ready --take()--> in training --trained()--> gone
                  \\--drop()--> gone

and holds one of the B = (S + 1) P slots from `admit` until `trained` (its weights are published) or `drop`. P is the
number of groups in a step, S the allowed staleness in whole steps, W = max(1, floor(window_fraction * B)) the window.

A finished group becomes ready, in admission order, once its order number is below (oldest live order) + W, where live
means admitted and neither ready, taken nor dropped. Batches are cut from the ready groups in the order in which they
became ready. W = 1 is strict admission order: a slow group holds everything back that was admitted after it.

Bound: the age of a group when it is trained, in weight versions, is at most S + ceil((W - 1) / P). Proof: when a group
is admitted, at most B - 1 others are alive. While it is live, only groups with a smaller order plus W - 1 can become
ready before it, so at most W - 1 younger ones pass it. Hence at most (B - 1) + (W - 1) groups are trained between its
admission and itself, and it is in the batch number floor((B + W - 2) / P) = S + ceil((W - 1) / P) after the one that
was next when it was admitted. Each batch raises the version by one.

Over-sampling (`oversampling` above 1) admits more than B groups, because the filter will drop some of the running ones. A
group admitted while fewer than B others were alive keeps its guarantee: the proof holds whatever comes after it. The
others are a bet. What the bet loses is known early: every P groups that become ready fill one more batch, so

    next batch trains version  v(next) = version + batches in training + floor(ready groups / P)

never falls, and a group that is not ready yet and was admitted below v(next) - bound can't be trained in time any more. It is
given up at once, running or finished, and its slot is free (`collect_surplus`). So the bound holds without exception, and
with S = 0 the end of a batch ends all generation for it. Expected kept groups stay within the slots: about r
running ones are admitted such that r * keep rate + kept groups <= B.

No deadlock: when nothing runs, no finished group waits for the window, so either P groups are ready, or a batch is in
training (whose end frees slots), or fewer than P <= B slots are taken and one can be admitted.

    scheduler = Scheduler(prompts_per_step=2, max_staleness=0, window_fraction=0.0)
    a, b = scheduler.admit(), scheduler.admit()      # no third: both slots are taken
    scheduler.finish(b, group_b)                     # waits behind a
    scheduler.drop(a); c = scheduler.admit()         # a was filtered out and is replaced
    scheduler.finish(c, group_c)
    scheduler.take(step=1)                           # [group_b, group_c]
    scheduler.trained(step=1, new_version=1)         # both slots are free again
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any

from rollout_service.config import RolloutSection
from rollout_service.sample import Group, WeightVersion


class StalenessViolation(RuntimeError):
    """A batch holds a group that is older than the bound allows. A fault of the program, never of the input."""


class Scheduler:
    """Owns every group from its admission until it is trained or dropped. Not thread-safe.

    Attributes:
        prompts_per_step: P. max_staleness: S. slots: B. window: W. bound: S + ceil((W - 1) / P), in versions.
        most_alive: groups that may be admitted and untrained at once: B, with over-sampling floor(oversampling * B).
        version: the published weight version; grows by one with every trained step.
    """

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int,
        window_fraction: float,
        version: WeightVersion = 0,
        oversampling: float = 1.0,
    ) -> None:
        if prompts_per_step < 1 or max_staleness < 0 or not 0.0 <= window_fraction <= 1.0 or oversampling < 1.0:
            raise ValueError(
                f"prompts_per_step={prompts_per_step} (at least 1), max_staleness={max_staleness} (at least 0), "
                f"window_fraction={window_fraction} (0 to 1), oversampling={oversampling} (at least 1)"
            )
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.slots = (max_staleness + 1) * prompts_per_step
        self.window = max(1, math.floor(window_fraction * self.slots + 1e-9))  # 0.29 * 100 is 28.999...
        self.bound = max_staleness + math.ceil((self.window - 1) / prompts_per_step)
        self.most_alive = math.floor(oversampling * self.slots + 1e-9)
        self._may_exceed_slots = self.most_alive > self.slots
        self.version = version
        self._next_order = 0
        self._last_trained_step: int | None = None
        self._admitted_version: dict[int, WeightVersion] = {}  # every order that holds a slot
        self._running: dict[int, None] = {}  # an ordered set: the first key is the oldest
        self._waiting: list[tuple[int, Group]] = []  # heap by order; orders are unique
        self._ready: deque[Group] = deque()
        self._in_training: dict[int, list[Group]] = {}  # by step, oldest first
        self._surplus: list[tuple[int, Group | None]] = []  # given up and not collected yet

    @classmethod
    def of(cls, rollout: RolloutSection) -> Scheduler:
        """The scheduler of a configuration, at version 0."""
        factor = rollout.oversampling.max_factor if rollout.oversampling.enable else 1.0
        return cls(rollout.prompts_per_step, rollout.max_staleness, rollout.window_fraction, oversampling=factor)

    def free_slots(self, keep_rate: float = 1.0) -> int:
        """Number of prompts that may be admitted now.

        Args:
            keep_rate: expected share (0 to 1) of running groups that the filter will keep; only over-sampling uses it.
        """
        alive = len(self._admitted_version)
        free = self.slots - alive
        if self.most_alive == self.slots:
            return max(0, free)
        kept = alive - len(self._running)
        worth_running = math.floor((self.slots - kept) / max(keep_rate, 1e-6) + 1e-9)
        return max(0, free, min(worth_running - len(self._running), self.most_alive - alive))

    def admit(self, keep_rate: float = 1.0) -> int:
        """Take a slot; returns the order number of the new group.

        Raises:
            RuntimeError: no slot is free.
        """
        if self.free_slots(keep_rate) < 1:
            raise RuntimeError(f"all {self.slots} slots are taken ({self.counts()}); wait for a drop or a trained step")
        order = self._next_order
        self._next_order += 1
        self._admitted_version[order] = self.version
        self._running[order] = None
        return order

    def finish(self, order: int, group: Group) -> None:
        """Hand in the complete, scored group of a running order. Stamps the group's `admitted_version`.

        With over-sampling this may give up groups, this one included: see `collect_surplus`.

        Raises:
            ValueError: the group belongs to another order, or a sample was not scored.
            RuntimeError: the order is not running (handed in before, or dropped).
        """
        if group.order != order:
            raise ValueError(f"group {group.prompt_id} has order {group.order}, not {order}")
        failed = [sample.error for sample in group.samples if sample.error is not None]
        if failed:
            raise ValueError(f"group {order} ({group.prompt_id}) has samples without a score: {failed}")
        self._leave_running(order)
        group.admitted_version = self._admitted_version[order]
        heapq.heappush(self._waiting, (order, group))
        self._slide_window()

    def drop(self, order: int) -> None:
        """Give up a running order (filtered out): its slot is free at once.

        Raises:
            RuntimeError: the order is not running.
        """
        self._leave_running(order)
        del self._admitted_version[order]
        self._slide_window()

    def collect_surplus(self) -> list[tuple[int, Group | None]]:
        """Orders given up since the last call, oldest first, each with its group if it had finished (else None: stop it).

        Their slots are free already. Without over-sampling there never is one.
        """
        surplus, self._surplus = self._surplus, []
        return surplus

    def batch_ready(self) -> bool:
        """Whether P groups are ready for a step that was not taken yet."""
        return len(self._ready) >= self.prompts_per_step

    def take(self, step: int) -> list[Group]:
        """The batch of a training step: exactly P groups, in the order in which they became ready.

        The same step may ask again, and gets the same batch, until `trained(step)`.

        Raises:
            RuntimeError: no batch is ready, or the step was trained already or is out of turn.
            StalenessViolation: a group is too old for the version at which the step will be trained.
        """
        if step in self._in_training:
            return list(self._in_training[step])
        newest = max(self._in_training, default=self._last_trained_step)
        if newest is not None and step <= newest:
            raise RuntimeError(f"step {step} asks for a batch after step {newest} got its own; steps only grow")
        if not self.batch_ready():
            raise RuntimeError(f"no batch of {self.prompts_per_step} groups is ready for step {step}: {self.counts()}")
        batch = [self._ready.popleft() for _ in range(self.prompts_per_step)]
        trained_at = self.version + len(self._in_training)  # steps taken before this one publish first
        for group in batch:
            self._check_staleness(group, step, trained_at)
        self._in_training[step] = batch
        return list(batch)

    def trained(self, step: int, new_version: WeightVersion) -> None:
        """The weights of a step are published: free its slots. Repeating the call is harmless.

        Raises:
            RuntimeError: the step was not taken, an earlier one is still in training, or the version does not grow by one.
        """
        if step == self._last_trained_step and new_version == self.version:
            return
        oldest = next(iter(self._in_training), None)
        if step != oldest:
            raise RuntimeError(f"step {step} cannot be trained now: the step in training is {oldest}")
        if new_version != self.version + 1:
            raise RuntimeError(
                f"step {step} publishes version {new_version} after {self.version}; versions grow by one"
            )
        for group in self._in_training.pop(step):
            del self._admitted_version[group.order]
        self.version = new_version
        self._last_trained_step = step

    def running_orders(self) -> list[int]:
        """Orders that are admitted and unfinished, oldest first. After a resume these must be generated again."""
        return list(self._running)

    def admitted_version(self, order: int) -> WeightVersion:
        """The version that was published when an order that still holds a slot was admitted."""
        return self._admitted_version[order]

    def counts(self) -> dict[str, int]:
        """Groups by state: `running + waiting + ready + in_training + free = slots + extra`; `finished = waiting + ready`."""
        waiting, ready = len(self._waiting), len(self._ready)
        return {
            "running": len(self._running),
            "finished": waiting + ready,
            "waiting": waiting,
            "ready": ready,
            "in_training": sum(len(batch) for batch in self._in_training.values()),
            "free": max(0, self.slots - len(self._admitted_version)),
            "extra": max(0, len(self._admitted_version) - self.slots),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs; plain data and groups."""
        return {
            "prompts_per_step": self.prompts_per_step,
            "max_staleness": self.max_staleness,
            "window": self.window,
            "version": self.version,
            "next_order": self._next_order,
            "last_trained_step": self._last_trained_step,
            "admitted_version": dict(self._admitted_version),
            "running": list(self._running),
            "waiting": [group for _, group in sorted(self._waiting, key=lambda entry: entry[0])],
            "ready": list(self._ready),
            "in_training": {step: list(batch) for step, batch in self._in_training.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`: running orders must be generated again, batches in training can be taken again.

        Raises:
            ValueError: the checkpoint was written with other queue settings, under which the bound does not hold here.
        """
        for name, key in (
            ("prompts_per_step", "rollout.prompts_per_step"),
            ("max_staleness", "rollout.max_staleness"),
            ("window", "rollout.window_fraction"),
        ):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint's queue has {name}={state[name]}, this run has {getattr(self, name)}: "
                    f"resume with the {key} that the checkpoint was written with"
                )
        self.version = state["version"]
        self._next_order = state["next_order"]
        self._last_trained_step = state["last_trained_step"]
        self._admitted_version = dict(state["admitted_version"])
        self._may_exceed_slots |= len(self._admitted_version) > self.slots  # written with over-sampling
        self._running = dict.fromkeys(sorted(state["running"]))
        self._waiting = [(group.order, group) for group in state["waiting"]]
        heapq.heapify(self._waiting)
        self._ready = deque(state["ready"])
        self._in_training = {step: list(batch) for step, batch in state["in_training"].items()}

    def _leave_running(self, order: int) -> None:
        if order not in self._running:
            raise RuntimeError(f"group {order} is not running: it was handed in or dropped before, or never admitted")
        del self._running[order]

    def _slide_window(self) -> None:
        # Every waiting group below the oldest running one is ready; so the oldest live order is the oldest running one.
        self._give_up_surplus()
        while self._waiting and self._waiting[0][0] < next(iter(self._running), math.inf) + self.window:
            self._ready.append(heapq.heappop(self._waiting)[1])
            self._give_up_surplus()

    def _give_up_surplus(self) -> None:
        """Remove what can't be trained within the bound any more. Older orders have older versions: they go first."""
        if not self._may_exceed_slots:
            return  # proved impossible; `take` asserts it
        next_batch = self.version + len(self._in_training) + len(self._ready) // self.prompts_per_step
        oldest_allowed = next_batch - self.bound
        given_up: list[tuple[int, Group | None]] = []
        while self._waiting and self._admitted_version[self._waiting[0][0]] < oldest_allowed:
            given_up.append(heapq.heappop(self._waiting))
        while self._running and self._admitted_version[order := next(iter(self._running))] < oldest_allowed:
            del self._running[order]
            given_up.append((order, None))
        for order, _ in given_up:
            del self._admitted_version[order]
        self._surplus += sorted(given_up, key=lambda entry: entry[0])

    def _check_staleness(self, group: Group, step: int, trained_at: WeightVersion) -> None:
        oldest = min([self._admitted_version[group.order], *([group.oldest_version] if group.samples else [])])
        if trained_at - oldest > self.bound:
            raise StalenessViolation(
                f"step {step} trains version {trained_at}, but group {group.order} ({group.prompt_id}) has tokens or an "
                f"admission of version {oldest}: age {trained_at - oldest} is above the bound {self.bound} "
                f"(max_staleness={self.max_staleness}, window={self.window}, prompts_per_step={self.prompts_per_step})"
            )
