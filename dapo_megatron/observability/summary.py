"""`summary.json` and the table that closes a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from dapo_megatron.observability.jsonl import plain

SUMMARY_FILE = "summary.json"

# Every key is always there; a value that was not measured is null.
SUMMARY_KEYS = (
    "accuracy_before_sampled",
    "accuracy_before_greedy",
    "accuracy_after_sampled",
    "accuracy_after_greedy",
    "steps",
    "wall_time_s",
    "tokens_per_s",
    "staleness_mean",
    "staleness_max",
    "weight_sync_s_median",
    "logprob_abs_diff_max",
    "phases_s",
)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` (whole or not at all).

    Args:
        summary: at least `SUMMARY_KEYS`; more keys are kept. `phases_s` maps a phase to its seconds.

    Raises:
        KeyError: a key is missing.
    """
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise KeyError(f"summary.json lacks {', '.join(missing)}")
    path = run_dir / SUMMARY_FILE
    draft = path.with_suffix(".json.tmp")
    draft.write_text(json.dumps(plain(dict(summary)), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary, or None when the run did not get to its end."""
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    assert isinstance(summary, dict)
    return summary


def summary_table(run_dir: Path, summary: Mapping[str, Any]) -> Table:
    """The closing table. Rows whose values were not measured are left out."""
    table = Table(title=f"run {run_dir.name}", title_justify="left", show_header=False, title_style="bold")
    table.add_column("what", style="cyan", no_wrap=True)
    table.add_column("value", overflow="fold")
    for kind in ("sampled", "greedy"):
        before, after = summary.get(f"accuracy_before_{kind}"), summary.get(f"accuracy_after_{kind}")
        if before is not None or after is not None:
            table.add_row(
                f"held-out accuracy, {kind}", f"{_number(before, '.3f')} -> [bold]{_number(after, '.3f')}[/bold]"
            )
    rows = (
        ("steps", _number(summary.get("steps"), "d")),
        ("wall time", _duration(summary.get("wall_time_s"))),
        ("throughput", _number(summary.get("tokens_per_s"), ",.0f", " tokens/s")),
        (
            "staleness, mean / max",
            f"{_number(summary.get('staleness_mean'), '.2f')} / {_number(summary.get('staleness_max'), 'g', ' versions')}",
        ),
        ("weight sync, median", _number(summary.get("weight_sync_s_median"), ".3f", " s")),
        ("log-prob gap, max", _number(summary.get("logprob_abs_diff_max"), ".2e", " nats between trainer and engine")),
        ("time by phase", _phases(summary.get("phases_s"))),
        ("checkpoint", str(summary.get("checkpoint_hf") or "-")),
        ("results", str(run_dir)),
    )
    for name, text in rows:
        if text.strip(" -/"):
            table.add_row(name, text)
    return table


def _number(value: Any, spec: str, unit: str = "") -> str:
    if value is None:
        return "-"
    return format(int(value) if spec == "d" else value, spec) + unit


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _phases(phases: Mapping[str, float] | None) -> str:
    longest_first = sorted((phases or {}).items(), key=lambda item: -(item[1] or 0.0))
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest_first if seconds) or "-"
