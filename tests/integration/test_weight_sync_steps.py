"""After every step of a real run, all engines hold the trainer's weights: TP2 x PP2, two SGLang engines, each transport.

Each transport takes a run of its own, about two minutes on two cores: `pytest -m slow` with this file. The default test run has each
transport against one real server (`test_weight_transports.py`), and the main job over the first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_main_job import dapo_run, metrics_of, tree_of, wait_until_gone

pytestmark = pytest.mark.slow

TRANSPORTS = ["distributed", "disk", "tensor", "delta"]
STEPS = 20
ENGINES = 2
TOLERANCE = 1e-4  # nats, both sides float32
OVERRIDES = [
    "trainer.total_steps=1000",
    "parallel.nproc_per_node=4",
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=2",
    f"rollout.engine.count={ENGINES}",
    "rollout.engine.health_interval_s=1",
    "rollout.prompts_per_step=2",
    "rollout.n_samples_per_prompt=8",
    "trainer.mini_batch_prompts=2",
    "optim.lr=1e-4",
    "weight_sync.bucket_mb=0.2",  # several buckets for each of four publishers
    "weight_sync.probe_tolerance=null",  # this file judges
    "evaluation.before_training=false",
    "evaluation.after_training=false",
]


class Run:
    """`dapo run` under way, and the rows of metrics.jsonl so far."""

    def __init__(self, root: Path, transport: str) -> None:
        self.transport = transport
        self.folder = root / transport
        self.process: subprocess.Popen[str] = dapo_run(
            root, transport, *OVERRIDES, f"weight_sync.transport={transport}"
        )

    def rows(self) -> list[dict[str, Any]]:
        # Its last line may still be being written.
        return metrics_of(self.folder) if (self.folder / "metrics.jsonl").exists() else []

    def wait_for(
        self, what: str, found: Callable[[list[dict[str, Any]]], bool], limit_s: float
    ) -> list[dict[str, Any]]:
        """The rows, once `found` says yes of them."""
        deadline = time.monotonic() + limit_s
        while not found(rows := self.rows()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s, at step {len(rows)}"
            time.sleep(0.2)
        return rows

    def engine_servers(self) -> dict[int, psutil.Process]:
        """The HTTP process of each engine, by engine id."""
        found = {}
        for process in tree_of(self.process):
            line = process.cmdline()
            if "--model-path" in line and "process_guard" not in " ".join(line):
                found[process.pid] = process
        return dict(enumerate(p for p in found.values() if p.ppid() not in found))


@pytest.fixture(scope="module", params=TRANSPORTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("sync-steps"), request.param)
    yield run
    if run.process.poll() is None:
        everything = tree_of(run.process)
        run.process.send_signal(signal.SIGINT)
        run.process.communicate(timeout=60)
        assert wait_until_gone(everything, timeout_s=20) == []


@pytest.mark.timeout(300)
def test_every_engine_agrees_with_the_trainer_after_each_of_twenty_steps(run: Run) -> None:
    rows = run.wait_for(f"{STEPS} steps", lambda rows: len(rows) >= STEPS, 240)[:STEPS]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["rollout_corr/probed_engines"] == ENGINES, row["step"]
        assert row["rollout_corr/logprob_abs_diff"] < TOLERANCE, row["step"]
        assert row["perf/update_weights_engines_lost"] == 0
        assert row["perf/update_weights_planned_bytes"] > 1_000_000 and row["perf/update_weights_bytes"] > 0
        # Every step moves the weights, by Adam's step size in each of them: an engine that missed one would be seen.
        assert row["actor/grad_norm"] > 0 and row["actor/updates_skipped"] == 0


@pytest.mark.timeout(300)
def test_a_killed_engine_is_back_at_the_trainers_weights_and_the_run_goes_on(run: Run) -> None:
    before = len(run.wait_for("a first step", lambda rows: len(rows) >= 1, 240))
    servers = run.engine_servers()
    assert len(servers) == ENGINES
    os.kill(servers[1].pid, signal.SIGKILL)

    def both_again(rows: list[dict[str, Any]]) -> bool:
        probed = [row["rollout_corr/probed_engines"] for row in rows[before:]]
        return 1 in probed and probed[-3:] == [ENGINES] * 3

    rows = run.wait_for("both engines probed again", both_again, 240)[before:]
    assert all(row["rollout_corr/logprob_abs_diff"] < TOLERANCE for row in rows)
    # The weights that it started from stayed there until it had loaded them, though dozens of versions came meanwhile.
    logs = "".join(path.read_text(errors="replace") for path in (run.folder / "logs").glob("*.log"))
    assert "restart 1 of" in logs and "restart 2 of" not in logs
