"""`dapo run` on wrong input, as a user meets it: one clear error, exit code 2, at once, before Ray or torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.config_files import write_config

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 5.0
HEAVY = {"torch", "ray", "megatron", "sglang", "transformers", "wandb"}
# The console command, plus a report of the heavy modules that were imported on the way.
COMMAND = f"""
import atexit, sys
atexit.register(lambda: print("IMPORTED", sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr))
from dapo_megatron.cli import main
sys.argv[0] = "dapo"
main()
"""


def dapo(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error; checks time and imports."""
    env = {k: v for k, v in os.environ.items() if k != "COVERAGE_PROCESS_START"} | {"PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert time.monotonic() - started < LIMIT_S
    *error, imported = done.stderr.splitlines()
    assert imported == "IMPORTED []"
    return done.returncode, done.stdout, "\n".join(error)


def wrong_key(folder: Path) -> list[str]:
    return ["trainer.total_step=5"]


def wrong_type(folder: Path) -> list[str]:
    return ["optim.lr=fast"]


def heads_not_divisible(folder: Path) -> list[str]:
    return ["parallel.tensor_model_parallel_size=4", "parallel.nproc_per_node=4"]


def missing_model(folder: Path) -> list[str]:
    return [f"model.path={folder / 'nowhere'}"]


def empty_data_file(folder: Path) -> list[str]:
    (folder / "empty.jsonl").write_text("")
    return [f"data.train={folder / 'empty.jsonl'}"]


def malformed_row(folder: Path) -> list[str]:
    rows = ['{"prompt": "a", "answer": "1"}', '{"prompt": "b", "answer": ']
    (folder / "broken.jsonl").write_text("\n".join(rows) + "\n")
    return [f"data.train={folder / 'broken.jsonl'}"]


def missing_column(folder: Path) -> list[str]:
    rows = [json.dumps({"prompt": "a", "answer": "1"}), json.dumps({"prompt": "b"})]
    (folder / "column.jsonl").write_text("\n".join(rows) + "\n")
    return [f"data.train={folder / 'column.jsonl'}"]


def wrong_verbatim_field(folder: Path) -> list[str]:
    return ["megatron.recompute_granularty=full"]


def several_machines(folder: Path) -> list[str]:
    return ["parallel.nnodes=2"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (wrong_key, ["trainer.total_step: unknown key; the nearest known key is trainer.total_steps"]),
        (wrong_type, ["optim.lr: 'fast' (str) given"]),
        (heads_not_divisible, ["tensor_model_parallel_size=4", "6 attention heads", "possible sizes: 1, 2"]),
        (missing_model, ["model.path: no folder"]),
        (empty_data_file, ["data.train: ", "empty.jsonl", "no rows"]),
        (malformed_row, ["data.train: ", "broken.jsonl", "row 2", "not valid JSON"]),
        (missing_column, ["data.train: ", "column.jsonl", "row 2", "no column 'answer'"]),
        (wrong_verbatim_field, ["megatron.recompute_granularty", "nearest: recompute_granularity"]),
        (several_machines, ["parallel.nnodes=2", "dapo rollout"]),
    ],
)
def test_wrong_input_is_one_clear_error_within_seconds(
    tmp_path: Path, spoil: Callable[[Path], list[str]], words: list[str]
) -> None:
    config = write_config(tmp_path)
    code, out, error = dapo("run", str(config), *spoil(tmp_path))
    assert code == 2
    assert out == ""
    assert sum(line.startswith("error:") for line in error.splitlines()) == 1
    assert "Traceback" not in error
    for word in words:
        assert word in error
    assert not (tmp_path / "runs" / "toy").exists()


def test_a_missing_configuration_file_is_one_clear_error(tmp_path: Path) -> None:
    code, _, error = dapo("run", str(tmp_path / "nowhere.yaml"))
    assert code == 2
    assert "no such file" in error


@pytest.mark.parametrize("command", [("run", "--dry-run"), ("config",)])
def test_a_dry_run_prints_the_resolved_configuration_and_starts_nothing(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    config = write_config(tmp_path)
    code, out, error = dapo(*command, str(config), "optim.lr=1e-6", "trainer.total_steps=7")
    assert code == 0, error
    tree = yaml.safe_load(out)
    assert tree["trainer"]["total_steps"] == 7
    assert tree["optim"]["lr"] == 1e-6
    assert tree["rollout"]["sampling"]["temperature"] == 1.0
    assert not (tmp_path / "runs").exists()


def test_help_lists_the_commands(tmp_path: Path) -> None:
    code, out, _ = dapo("--help")
    assert code == 0
    for command in ("run", "train", "rollout", "config", "doctor"):
        assert command in out
