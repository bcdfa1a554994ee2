"""Dynamic sampling in the main job: data that teach nothing are reported, over-sampling keeps the run on-policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_main_job import dapo_run, finish, metrics_of

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
    output = " ".join(output.split())  # the closing message is wrapped
    assert "warning: step 1: 16 of the last 16 groups taught nothing" in output
    assert "no batch for step 1 within rollout.batch_timeout_s=20" in output
    assert "does not match rollout.reward.rule" in output


@pytest.mark.timeout(280)
def test_oversampling_and_curriculum_in_a_synchronous_run(tmp_path: Path) -> None:
    keys = ["rollout.max_staleness=0", "evaluation.before_training=false", "rollout.oversampling.enable=true"]
    keys += ["rollout.oversampling.max_factor=4", "rollout.curriculum.enable=true", "rollout.curriculum.solved_times=1"]
    process = dapo_run(tmp_path, "ahead", *keys, "trainer.total_steps=6")
    output = finish(process)
    assert process.returncode == 0, output
    rows = metrics_of(tmp_path / "ahead")
    assert len(rows) == 6
    for row in rows:
        assert row["training/off_policy/staleness/max"] == 0
        assert row["training/filter_groups/kept"] >= 8
        assert abs(row["actor/ppo_kl_first_minibatch"]) < 1e-7
        assert row["training/curriculum/resting"] >= 0
        assert 0 < row["training/oversampling/keep_rate"] <= 1
        assert 0 <= row["training/filter_groups/acc"] <= 1
    kept = sum(row["training/filter_groups/kept"] for row in rows)
    discarded = sum(row["training/oversampling/discarded"] for row in rows)
    assert kept - discarded == 6 * 8
