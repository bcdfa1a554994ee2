"""The service's numbers: totals since the start, and what changed since the last ticket."""

from __future__ import annotations

import time

from rollout_service.curriculum import Curriculum
from rollout_service.filters import GroupFilter
from rollout_service.fleet import EngineState, Fleet
from rollout_service.group_loop import GIVEN_UP, GroupLoop
from rollout_service.group_runner import GroupRunner
from rollout_service.rewards.scorer import RewardScorer
from rollout_service.scheduler import Scheduler


class ServiceStatistics:
    """Reads the parts' own counters; keeps only the clock of idle time.

    Idle is the time in which no group was running (all slots finished or in training) or the engines were paused for
    an update.
    """

    def __init__(self, fleet: Fleet, group_filter: GroupFilter, rewards: RewardScorer, scheduler: Scheduler) -> None:
        self._runner: GroupRunner | None = None
        self._loop: GroupLoop | None = None
        self._curriculum: Curriculum | None = None
        self._fleet = fleet
        self._filter = group_filter
        self._rewards = rewards
        self._scheduler = scheduler
        self._oversampling = scheduler.most_alive > scheduler.slots
        self._groups = 0
        self._paused = False
        self._idle_s = 0.0
        self._idle_since: float | None = time.monotonic()
        self._started = time.monotonic()
        self._last: dict[str, float] = {}
        self._last_ticket = time.monotonic()

    def watch(self, runner: GroupRunner, loop: GroupLoop, curriculum: Curriculum) -> None:
        """Count these parts too; they exist once the prompts are loaded."""
        self._runner, self._loop, self._curriculum = runner, loop, curriculum

    def running(self, groups: int) -> None:
        """Note the number of groups that are being generated or scored."""
        self._groups = groups
        self._clock()

    def paused(self, paused: bool) -> None:
        """Note the beginning and the end of a pause for an update."""
        self._paused = paused
        self._clock()

    def _clock(self) -> None:
        now, idle = time.monotonic(), self._paused or not self._groups
        if not idle and self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        elif idle and self._idle_since is None:
            self._idle_since = now

    def totals(self) -> dict[str, float]:
        """Counts and seconds since the start, and the present state of queue and engines."""
        growing = self._growing()
        elapsed = max(time.monotonic() - self._started, 1e-9)
        growing |= self._filter.totals()
        return growing | self._present() | {"fully_async/rollouter/idle_ratio": growing["rollout/idle_s"] / elapsed}

    def since_last_ticket(self) -> dict[str, float]:
        """What grew since the last call, the present state, and the filter's counts (which start anew)."""
        now = time.monotonic()
        elapsed, self._last_ticket = max(now - self._last_ticket, 1e-9), now
        growing = self._growing()
        stats = {name: value - self._last.get(name, 0.0) for name, value in growing.items()}
        self._last = growing
        stats |= self._present() | self._filter.stats()
        self._filter.reset_stats()
        if self._curriculum is not None:
            stats |= self._curriculum.stats()
            self._curriculum.reset_stats()
        stats["rollout/tokens_per_s"] = stats["rollout/tokens"] / elapsed
        stats["fully_async/rollouter/idle_ratio"] = min(1.0, stats["rollout/idle_s"] / elapsed)
        return stats

    def _growing(self) -> dict[str, float]:
        idle = self._idle_s + (time.monotonic() - self._idle_since if self._idle_since is not None else 0.0)
        growing = {
            "rollout/idle_s": idle,
            "rollout/engine/restarts": float(self._fleet.counters["restarts"]),
            "rollout/engine/requeued": float(self._fleet.counters["requeued"]),
            "rollout/engine/unpublished": float(self._fleet.counters["unpublished"]),
        }
        if self._runner is not None:
            counters = self._runner.counters
            growing |= {
                "rollout/samples": float(counters.samples),
                "rollout/tokens": float(counters.tokens),
                "rollout/retried_samples": float(counters.retried_samples),
                "rollout/generate_s": counters.generate_s,
                "rollout/reward_s": counters.reward_s,
            }
            growing |= {f"rollout/fault/{kind}": float(count) for kind, count in counters.faults.items()}
        if self._loop is not None and self._oversampling:
            growing |= {f"training/oversampling/{name}": float(self._loop.counters[name]) for name in GIVEN_UP}
        rewards = self._rewards.stats()
        return growing | {name: value for name, value in rewards.items() if name != "reward/idle_workers"}

    def _present(self) -> dict[str, float]:
        ready = sum(engine.state is EngineState.READY for engine in self._fleet.engines)
        queue = {f"rollout/queue/{name}": float(number) for name, number in self._scheduler.counts().items()}
        present = queue | {"rollout/engine/alive": float(ready)}
        if self._oversampling:
            present["training/oversampling/keep_rate"] = self._filter.keep_rate()
        return present
