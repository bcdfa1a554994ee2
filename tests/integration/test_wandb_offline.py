"""W&B for real, offline: the run is written and no process of W&B stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config_files import write_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from pathlib import Path
import psutil
from dapo_megatron.config import load_config
from dapo_megatron.observability.sinks import MetricsLogger
config = load_config(Path(sys.argv[1]), ["observability.wandb.mode=" + sys.argv[3]])
logger = MetricsLogger(config, Path(sys.argv[2]))
for step in (1, 2, 2):
    logger.log(step, {"actor/pg_loss": 0.5, "actor/entropy": float("nan")})
logger.close()
psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
print("children", len(psutil.Process().children(recursive=True)), "wandb" in sys.modules)
"""


@pytest.mark.parametrize(("mode", "imported"), [("offline", True), ("off", False)])
def test_an_offline_run_is_written_and_leaves_no_process(tmp_path: Path, mode: str, imported: bool) -> None:
    config = write_config(tmp_path)
    run_dir = tmp_path / "run"
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(config), str(run_dir), mode],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"children 0 {imported}"
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    written = list(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(written) == (1 if imported else 0)
    assert all(file.stat().st_size > 200 for file in written)
