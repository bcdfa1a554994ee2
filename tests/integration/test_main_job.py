"""The main job on its real parts: `dapo run` with Megatron under torchrun, SGLang, Ray and math-verify."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SMALL = [
    "trainer.total_steps=3",
    "rollout.prompts_per_step=8",
    "rollout.n_samples_per_prompt=8",
    "trainer.mini_batch_prompts=4",
    "evaluation.sets.heldout.max_rows=16",
    "evaluation.sets.heldout.n=2",
    "observability.wandb.mode=off",
]


def dapo_run(run_dir: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dapo_megatron.cli", "run", "configs/quickstart.yaml", "--plain", *SMALL]
    command += [f"run.dir={run_dir}", f"run.name={name}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> str:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"the run did not end within {timeout_s} s:\n{output}")
    return output


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "actor/pg_loss" in row]


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that name the run folder, or whose environment or parentage does."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(folder) in line and process.pid != os.getpid():
            found.append(f"{process.pid}: {line[:200]}")
    return found


def tree_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> list[str]:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [
        f"{p.pid}: {' '.join(p.cmdline())[:200]}"
        for p in alive
        if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run without staleness, tensor parallel 2, weights broadcast to the engine."""
    root = tmp_path_factory.mktemp("sync")
    process = dapo_run(root, "sync", "rollout.max_staleness=0")
    output = finish(process)
    assert process.returncode == 0, output
    return root / "sync", output


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run with one step of staleness, two pipeline stages, weights through files."""
    root = tmp_path_factory.mktemp("pp")
    layout = ["parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2"]
    process = dapo_run(root, "pp", *layout, "weight_sync.transport=disk", "rollout.filter_groups.enable=false")
    output = finish(process)
    assert process.returncode == 0, output
    return root / "pp", output


@pytest.mark.timeout(300)
def test_synchronous_run_is_on_policy(synchronous: tuple[Path, str]) -> None:
    rows = metrics_of(synchronous[0])
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["training/off_policy/staleness/max"] == 0
        assert abs(row["actor/ppo_kl_first_minibatch"]) < 1e-7
        # The ids that were sampled are the ids that are trained: any shift would show in the engine's log-probs.
        assert row["rollout_corr/behaviour_abs_diff_max"] < 1e-4
        assert row["rollout_corr/is_weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4
        assert row["actor/updates_skipped"] == 0


@pytest.mark.timeout(300)
def test_batches_hold_only_informative_groups(synchronous: tuple[Path, str]) -> None:
    for row in metrics_of(synchronous[0]):
        assert row["training/filter_groups/kept"] >= 8
        assert 0 < row["critic/score/mean"] < 1
        assert row["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.timeout(300)
def test_run_folder_is_complete(synchronous: tuple[Path, str]) -> None:
    folder, output = synchronous
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("accuracy_before_sampled", "accuracy_before_greedy", "accuracy_after_sampled", "accuracy_after_greedy"):
        assert 0 <= summary[key] <= 1, key
    assert summary["steps"] == 3
    assert summary["staleness_max"] == 0
    assert summary["logprob_abs_diff_max"] < 1e-4
    assert summary["wall_time_s"] > 0 and summary["tokens_per_s"] > 0 and summary["weight_sync_s_median"] > 0
    assert summary["phases_s"]["update_actor"] > 0
    assert (folder / "resolved_config.yaml").is_file()
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 6
    assert "held-out accuracy" in output and "log-prob gap" in output


@pytest.mark.timeout(300)
def test_exported_checkpoint_loads_in_transformers_and_has_moved(synchronous: tuple[Path, str]) -> None:
    from transformers import AutoTokenizer

    from tests.toy_models import hf_logprobs, load_model

    exported = synchronous[0] / "checkpoint_hf"
    tokenizer = AutoTokenizer.from_pretrained(str(exported))
    ids = tokenizer("sort 52913", add_special_tokens=False)["input_ids"] + tokenizer("Answer: 12359")["input_ids"]
    before = hf_logprobs(load_model(ROOT / "assets/quickstart/model"), ids)
    after = hf_logprobs(load_model(exported), ids)
    assert after.sum() > before.sum(), "three steps must make a right answer likelier"


@pytest.mark.timeout(300)
def test_pipelined_run_through_files_agrees_with_the_engine(pipelined: tuple[Path, str]) -> None:
    rows = metrics_of(pipelined[0])
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["rollout_corr/logprob_abs_diff"] < 1e-4 for row in rows)
    assert max(row["training/off_policy/staleness/max"] for row in rows) <= 1
    versions = sorted(path.name for path in (pipelined[0] / "weights").iterdir())
    assert versions == ["v3"], "older versions are removed"


@pytest.mark.timeout(300)
def test_no_process_outlives_a_finished_run(synchronous: tuple[Path, str], pipelined: tuple[Path, str]) -> None:
    assert processes_of(synchronous[0]) == []
    assert processes_of(pipelined[0]) == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_killed_run_leaves_no_process_and_the_next_starts_at_once(tmp_path: Path, how: signal.Signals) -> None:
    process = dapo_run(tmp_path, "killed", "trainer.total_steps=1000", "evaluation.before_training=false")
    deadline = time.monotonic() + 150
    while not (tmp_path / "killed" / "metrics.jsonl").exists() or not metrics_of(tmp_path / "killed"):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step within 150 s"
        time.sleep(0.5)
    everything = tree_of(process)
    assert len(everything) >= 6, "launcher, service, torchrun, two ranks, Ray and SGLang"
    process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -9), output
    assert wait_until_gone(everything, timeout_s=20) == []
    assert processes_of(tmp_path / "killed") == []
    if how == signal.SIGKILL:
        again = dapo_run(
            tmp_path,
            "killed",
            "trainer.total_steps=1",
            "evaluation.before_training=false",
            "evaluation.after_training=false",
        )
        output = finish(again)
        assert again.returncode == 0, output
        assert "kept as killed.1" in output
