"""Everything that trainer rank 0 writes into the run folder, behind one object; other ranks hold an inactive one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dapo_megatron.config.sections import RunConfig
from dapo_megatron.observability.events import EventLog
from dapo_megatron.observability.jsonl import JsonlWriter
from dapo_megatron.observability.sinks import MetricsLogger
from dapo_megatron.observability.summary import write_summary
from rollout_service.prompts import load_tokenizer
from rollout_service.sample import Ticket

SAMPLES_FILE = "samples.jsonl"

FetchGroups = Callable[[list[Any]], list[dict[str, np.ndarray]]]


class RunLog:
    """Metrics, events, sample completions and the summary of a run.

    Args:
        active: true on global rank 0 only; an inactive log accepts every call and writes nothing.
    """

    def __init__(self, config: RunConfig, run_dir: Path, active: bool) -> None:
        self.active = active
        self._config = config
        self._run_dir = run_dir
        self._tokenizer: Any = None
        self._pending: dict[str, float] = {}
        if active:
            self._events = EventLog(run_dir)
            self._metrics = MetricsLogger(config, run_dir)
            self._samples = JsonlWriter(run_dir / SAMPLES_FILE)

    def event(self, name: str, **fields: Any) -> None:
        """Say what the run is doing now; see `events.EVENTS`."""
        if self.active:
            self._events.emit(name, **fields)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics, with evaluations that came in since the last step."""
        if self.active:
            self._metrics.log(step, {**metrics, **self._pending})
            self._pending = {}

    def evaluation(self, version: int, name: str, results: Mapping[str, Mapping[str, float]]) -> None:
        """Write an evaluation of weights `version`: at once before the first and after the last step, else with the next step.

        Args:
            results: metrics by decoding (`greedy`, `sampled`).
        """
        if not self.active:
            return
        metrics: dict[str, float] = {}
        for decoding, values in results.items():
            for key, value in values.items():
                if key.startswith("acc/"):
                    metrics[f"val-core/{name}/{decoding}/{key}"] = value
                elif key != "acc":
                    metrics[f"val-aux/{name}/{decoding}/{key.replace('/', '_')}"] = value
        if version in (0, self._config.trainer.total_steps):
            self._metrics.log(version, metrics)
        else:
            self._pending |= metrics

    def samples(self, step: int, ticket: Ticket, fetch: FetchGroups) -> None:
        """Write the first sample of the first groups of a batch, as text."""
        count = min(self._config.observability.samples_per_step, len(ticket.groups))
        if not self.active or count == 0:
            return
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._config.model.path, self._config.model.trust_remote_code)
        for meta, group in zip(ticket.groups, fetch(ticket.refs[:count]), strict=False):
            end = int(group["offsets"][1])
            self._samples.write(
                {
                    "step": step,
                    "prompt_id": meta.prompt_id,
                    "epoch": meta.epoch,
                    "prompt": self._tokenizer.decode(group["prompt_ids"].tolist()),
                    "response": self._tokenizer.decode(group["response_ids"][:end].tolist()),
                    "acc": float(meta.acc[0]),
                    "reward": float(meta.rewards[0]),
                    "reward_parts": {name: float(values[0]) for name, values in meta.reward_parts.items()},
                    "truncated": bool(meta.truncated[0]),
                    "versions": sorted(set(group["token_versions"][:end].tolist())),
                }
            )

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        if self.active:
            write_summary(self._run_dir, summary)

    def close(self) -> None:
        if self.active:
            self._samples.close()
            self._metrics.close()
            self._events.close()
