"""`events.jsonl`: what a run is doing before, between and after its steps, for the launcher's view.

Trainer rank 0 writes, the launcher follows. Each line is `{"time": seconds since 1970, "event": name, ...}`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dapo_megatron.observability.jsonl import JsonlWriter

EVENTS_FILE = "events.jsonl"

# Events by name, with the words that the view shows while they last.
EVENTS = {
    "load_model": "loading the model",
    "wait_for_engines": "waiting for the engines",
    "evaluate_before": "evaluating the starting weights",
    "evaluate_after": "evaluating the exported checkpoint",
    "export": "writing the Hugging Face checkpoint",
    "update_skipped": "update skipped, loss or gradient not finite",
    "warning": "warning",
}
# Events that report something and do not say what the run does next.
REMARKS = ("update_skipped", "warning")


class EventLog:
    """Writes events of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = JsonlWriter(run_dir / EVENTS_FILE)

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event.

        Args:
            event: a name of `EVENTS`; `warning` carries `message`.

        Raises:
            KeyError: the event is not declared.
        """
        if event not in EVENTS:
            raise KeyError(f"event {event!r} is not declared: add it to dapo_megatron/observability/events.py")
        self._writer.write({"time": time.time(), "event": event, **fields})

    def close(self) -> None:
        self._writer.close()


def event_text(event: dict[str, Any]) -> str:
    """An event as words: `loading the model: path runs/m, device cpu`; a warning is its message."""
    name = str(event.get("event"))
    if name == "warning":
        return f"warning: {event.get('message', '')}"
    fields = [f"{key} {_show(value)}" for key, value in event.items() if key not in ("time", "event")]
    text = EVENTS.get(name, name)
    return f"{text}: {', '.join(fields)}" if fields else text


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
