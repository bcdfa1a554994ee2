"""What a run is doing, read from its files: the latest step, the phase, running totals and the time left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from dapo_megatron.observability.events import EVENTS, EVENTS_FILE, REMARKS, event_text
from dapo_megatron.observability.jsonl import JsonlFollower
from dapo_megatron.observability.sinks import METRICS_FILE

# A line of metrics.jsonl with this name belongs to a training step; other lines are evaluations.
STEP_MARK = "timing_s/step"
# The time left is judged by the latest steps, because response lengths drift.
ETA_STEPS = 10


class RunState:
    """Follows `metrics.jsonl` and `events.jsonl` of a run folder.

    Attributes:
        step: last finished training step, 0 before the first.
        latest: its metrics.
        totals: sums over all steps of `training/filter_groups/*`, by outcome.
        evaluations: latest value by `val-core/...` name.
        phase: words for what the run is doing.
        phase_since: when that began, seconds since 1970.
        remarks: warnings and skipped updates in order.
    """

    def __init__(self, run_dir: Path, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.latest: dict[str, Any] = {}
        self.totals: dict[str, float] = {}
        self.evaluations: dict[str, float] = {}
        self.phase = "starting the trainer and the engines"
        self.started = self.phase_since = time.time()
        self.remarks: list[str] = []
        self._metrics = JsonlFollower(run_dir / METRICS_FILE)
        self._events = JsonlFollower(run_dir / EVENTS_FILE)
        self._durations: deque[float] = deque(maxlen=ETA_STEPS)

    def poll(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read what is new. Returns the new events and the new lines of metrics."""
        events, metrics = self._events.read_new(), self._metrics.read_new()
        for event in events:
            self._take_event(event)
        for line in metrics:
            self._take_metrics(line)
        return events, metrics

    def eta_s(self) -> float | None:
        """Seconds until the last training step ends, or None before the first step."""
        if not self._durations:
            return None
        # The median, because the first step also waits for the engines to start.
        return (self.total_steps - self.step) * statistics.median(self._durations)

    def value(self, name: str) -> float | None:
        """A metric of the latest step; None when it was not measured."""
        number = self.latest.get(name)
        return float(number) if isinstance(number, int | float) else None

    def _take_event(self, event: dict[str, Any]) -> None:
        name = str(event.get("event"))
        if name in REMARKS:
            self.remarks.append(event_text(event))
        else:
            self._enter(EVENTS.get(name, name), event)

    def _enter(self, phase: str, record: dict[str, Any]) -> None:
        if phase != self.phase:
            self.phase = phase
            self.phase_since = float(record.get("time") or time.time())

    def _take_metrics(self, line: dict[str, Any]) -> None:
        self.evaluations |= {k: v for k, v in line.items() if k.startswith("val-core/") and v is not None}
        if self.step < self.total_steps:
            self._enter("training", line)
        if STEP_MARK not in line:
            return
        self.step = int(line["step"])
        self.latest = line
        duration = line[STEP_MARK]
        if duration is not None:
            self._durations.append(float(duration))
        for name, value in line.items():
            if name.startswith("training/filter_groups/") and isinstance(value, int | float):
                outcome = name.rpartition("/")[2]
                self.totals[outcome] = self.totals.get(outcome, 0.0) + value
