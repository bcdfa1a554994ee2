"""`MetricsLogger`: every metric of a run to every sink."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo_megatron.config.sections import RunConfig
from dapo_megatron.observability.jsonl import JsonlWriter, plain
from dapo_megatron.observability.metrics import require_declared
from dapo_megatron.observability.wandb_sink import WandbSink

METRICS_FILE = "metrics.jsonl"


class MetricsLogger:
    """Used by trainer rank 0 only. `metrics.jsonl` gets one object a call: `{"step", "time", <metric>: number|null}`."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._jsonl = JsonlWriter(run_dir / METRICS_FILE)
        self._wandb = WandbSink(config.observability.wandb, config.run.name, run_dir, config.model_dump(mode="json"))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step's metrics.

        Args:
            step: training step from 1; 0 is before the first. May not go backwards (W&B would drop it).
            metrics: numbers by declared name; NumPy and one-element torch values are taken too. NaN and infinities
                are written as null.

        Raises:
            KeyError: a name is not declared in `metrics.py`.
        """
        for name in metrics:
            require_declared(name)
        values = plain(dict(metrics))
        self._jsonl.write({"step": step, "time": time.time(), **values})
        self._wandb.log(step, values)

    def close(self) -> None:
        self._jsonl.close()
        self._wandb.close()
