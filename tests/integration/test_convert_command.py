"""`dapo convert` as a user runs it: its commands, several workers, a kill in mid-conversion, and going on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoint_convert.convert import Options, hf_to_megatron, megatron_to_hf
from tests.hf_folders import assert_same_weights
from tests.toy_models import make_model

# About 65 MB in 150 files: long enough to be killed in the middle.
LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 15, "vocab_size": 2000}
SHARD = "500KB"


def dapo_convert(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "dapo_megatron.cli", "convert", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(dapo_convert(*arguments), capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def large(root: Path) -> Path:
    return make_model(root / "large", "llama", **LARGE)


@pytest.fixture(scope="module")
def checkpoint(root: Path, large: Path) -> Path:
    return hf_to_megatron(large, root / "large-megatron", Options(durable=False))


def finished_files(hidden: Path) -> list[str]:
    """Names in the journal of whole lines."""
    try:
        lines = (hidden / "journal.jsonl").read_text().split("\n")[1:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line)["file"] for line in lines]


def test_a_killed_conversion_leaves_no_folder_and_goes_on(root: Path, large: Path, checkpoint: Path) -> None:
    out, hidden = root / "killed", root / ".killed.converting"
    command = dapo_convert("megatron-to-hf", checkpoint, out, "--max-shard-size", SHARD)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(finished_files(hidden)) < 5:
        assert process.poll() is None, f"it ended before it was killed: {process.stderr.read().decode()}"
        assert time.monotonic() < deadline, "no file was finished within a minute"
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert not out.exists()
    done = finished_files(hidden)
    assert len(done) >= 5

    # One finished file is damaged meanwhile, at its end; the other finished ones need not be written again.
    damaged = hidden / done[1]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    inodes = {name: (hidden / name).stat().st_ino for name in done}
    times = {name: (hidden / name).stat().st_mtime_ns for name in done}
    again = run("megatron-to-hf", checkpoint, out, "--max-shard-size", SHARD)
    assert again.returncode == 0, again.stderr
    assert_same_weights(large, out)
    kept = [
        name
        for name in done
        if (out / name).stat().st_ino == inodes[name] and (out / name).stat().st_mtime_ns == times[name]
    ]
    assert kept == [done[0], *done[2:]]
    assert not hidden.exists() and not list(out.glob("*journal*"))


def test_other_arguments_do_not_go_on_with_the_files_of_a_killed_run(root: Path, large: Path, checkpoint: Path) -> None:
    out, hidden = root / "changed", root / ".changed.converting"
    hidden.mkdir()
    (hidden / "journal.jsonl").write_text('{"fingerprint":"of other arguments"}\n{"file":"model.safe')
    (hidden / "model-00001-of-00002.safetensors").write_bytes(b"left behind")
    result = run("megatron-to-hf", checkpoint, out)
    assert result.returncode == 0, result.stderr
    assert_same_weights(large, out)
    assert sorted(path.name for path in out.glob("model*")) == ["model.safetensors"]


def test_two_workers_write_what_one_writes(root: Path, large: Path, checkpoint: Path) -> None:
    one = megatron_to_hf(checkpoint, root / "one", Options(durable=False), max_shard_bytes=4_000_000)
    result = run("megatron-to-hf", checkpoint, root / "two", "--workers", 2, "--max-shard-size", "4MB")
    assert result.returncode == 0, result.stderr
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in (root / "two").iterdir()}


def test_an_error_of_a_worker_is_one_line_and_leaves_nothing(root: Path, checkpoint: Path) -> None:
    # Every file is larger than the system allows here, so that none is finished.
    command = dapo_convert("megatron-to-hf", checkpoint, root / "full", "--workers", 2, "--max-shard-size", "4MB")
    result = subprocess.run(
        ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2
    assert "cannot write model." in result.stderr and "larger than the system allows" in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not [path for path in root.iterdir() if "full" in path.name]


def test_the_commands_agree_about_a_round_trip(root: Path) -> None:
    source = make_model(root / "small", "qwen3", vocab_size=77)
    megatron, back = root / "small-megatron", root / "small-back"
    assert run("hf-to-megatron", source, megatron).returncode == 0
    assert run("megatron-to-hf", megatron, back).returncode == 0
    same = run("verify", source, megatron, "--logits")
    assert same.returncode == 0, same.stderr
    assert "logits differ by at most 0\n" in same.stdout and "the checkpoints agree: 25 of 25 tensors" in same.stdout

    assert run("hf-to-megatron", source, root / "small-bf16", "--dtype", "bf16").returncode == 0
    rounded = run("verify", root / "small-bf16", source)
    assert rounded.returncode == 1
    assert "model.embed_tokens.weight: dtype torch.bfloat16 and torch.float32" in rounded.stdout
    close = run("verify", root / "small-bf16", source, "--rtol", 0.004, "--atol", 0)
    assert close.returncode == 0, close.stdout

    shown = run("inspect", megatron)
    assert shown.returncode == 0, shown.stderr
    assert "decoder.layers.mlp.linear_fc1.weight" in shown.stdout and "2 x 224 x 48" in shown.stdout
    assert "layers stacked along the first dimension" in shown.stdout
    shown = run("inspect", back)
    assert "model.layers.{0..1}.mlp.down_proj.weight" in shown.stdout and "1 safetensors file" in shown.stdout

    twice = run("hf-to-megatron", source, megatron)
    assert twice.returncode == 2 and twice.stderr.startswith("error: ") and "--overwrite" in twice.stderr
    assert run("megatron-to-hf", megatron, root / "x", "--max-shard-size", "big").returncode == 2
