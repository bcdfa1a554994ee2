"""Data on which no group ever teaches anything: the user is told while the trainer still waits, and the run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_main_job import dapo_run, finish

# One group in flight at a time is scored against an answer that no response can have.
UNSOLVABLE = [
    "rollout.filter_groups.window_groups=16",
    "rollout.batch_timeout_s=20",
    "evaluation.before_training=false",
    "rollout.max_staleness=0",
]


@pytest.mark.timeout(280)
def test_the_filter_warns_in_the_terminal_and_in_the_events_before_the_batch_times_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"sort {n}", "answer": "no number at all"} for n in range(10000, 10040)]
    data = tmp_path / "unsolvable.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = dapo_run(tmp_path, "unsolvable", *UNSOLVABLE, f"data.train=[{data}]")
    output = finish(process)
    assert process.returncode == 1, output
    events = [json.loads(line) for line in (tmp_path / "unsolvable" / "events.jsonl").read_text().splitlines()]
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert "step 1: 16 of the last 16 groups taught nothing: 16 all wrong, 0 all right" in warnings[0]
    assert "warning: step 1: 16 of the last 16 groups taught nothing" in output
    assert "no batch for step 1 within rollout.batch_timeout_s=20" in output
    assert "does not match rollout.reward.rule" in output
