"""The registry of names and the logger that refuses all others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dapo_megatron.config import RunConfig, load_config
from dapo_megatron.observability.jsonl import JsonlFollower, JsonlWriter, read_jsonl
from dapo_megatron.observability.metrics import FAMILIES, METRICS, is_declared
from dapo_megatron.observability.sinks import METRICS_FILE, MetricsLogger
from dapo_megatron.observability.wandb_sink import WandbSink, resolve_mode
from tests.config_files import write_config

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(write_config(tmp_path))


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("actor/pg_loss", True),
        ("actor/pgloss", False),
        ("timing_s/update_weights", True),
        ("timing_s/update_weights/gather", True),
        ("timing_s/", False),
        ("timing_s", False),
        ("training/filter_groups/solve_none", True),
        ("training/filter_group/solve_none", False),
        ("val-core/aime-2024/acc/mean@32", True),
        ("val-core/aime-2024/acc/median@32", False),
        ("val-core/aime/2024/more/acc/mean@32", False),
    ],
)
def test_a_name_is_declared_exactly_or_by_its_family(name: str, declared: bool) -> None:
    assert is_declared(name) is declared


def test_no_name_is_declared_twice() -> None:
    names = [metric.name for metric in METRICS + FAMILIES]
    assert len(names) == len(set(names))


def test_every_metric_name_written_in_the_packages_is_declared() -> None:
    groups = {metric.name.split("/")[0] for metric in METRICS}
    literal = re.compile(r'"((?:' + "|".join(sorted(groups)) + r')/[a-z0-9_/@-]*[a-z0-9])"')
    found = {
        name
        for package in ("dapo_megatron", "rollout_service")
        for file in (ROOT / package).rglob("*.py")
        for name in literal.findall(file.read_text(encoding="utf-8"))
    }
    assert len(found) > 30
    assert sorted(name for name in found if not is_declared(name)) == []


def test_one_object_a_step_with_scalars_of_any_library(tmp_path: Path, config: RunConfig) -> None:
    logger = MetricsLogger(config, tmp_path)
    logger.log(1, {"actor/pg_loss": np.float32(0.5), "actor/lr": 1e-6, "training/epoch": np.int64(2)})
    logger.log(2, {"actor/pg_loss": float("nan"), "actor/grad_norm": float("inf"), "actor/entropy": np.float64("-inf")})
    logger.close()
    first, second = (json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines())
    assert (first["step"], first["actor/pg_loss"], first["actor/lr"], first["training/epoch"]) == (1, 0.5, 1e-6, 2)
    assert [second[k] for k in ("actor/pg_loss", "actor/grad_norm", "actor/entropy")] == [None, None, None]


def test_an_undeclared_name_is_refused_and_nothing_is_written(tmp_path: Path, config: RunConfig) -> None:
    logger = MetricsLogger(config, tmp_path)
    with pytest.raises(KeyError, match="actor/new_thing"):
        logger.log(1, {"actor/pg_loss": 0.5, "actor/new_thing": 1.0})
    logger.close()
    assert read_jsonl(tmp_path / METRICS_FILE) == []


def test_a_line_cut_by_a_crash_spoils_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "acto')
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert [record["step"] for record in read_jsonl(path)] == [1, 3]


def test_a_follower_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    follower = JsonlFollower(path)
    assert follower.read_new() == []
    path.write_bytes(b'{"step": 1}\n{"st')
    assert follower.read_new() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert follower.read_new() == [{"step": 2}]
    assert follower.read_new() == []


@pytest.mark.parametrize(
    ("mode", "variables", "resolved"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("off", {"WANDB_API_KEY": "k"}, "off"),
        ("online", {"WANDB_MODE": "disabled"}, "off"),
        ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
    ],
)
def test_wandb_goes_online_only_with_a_key(
    tmp_path: Path,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    variables: dict[str, str],
    resolved: str,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    section = config.observability.wandb.model_copy(update={"mode": mode})
    assert resolve_mode(section) == resolved


def test_wandb_is_online_with_a_netrc_entry(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password abc\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert resolve_mode(config.observability.wandb.model_copy(update={"mode": "auto"})) == "online"


def test_failures_of_wandb_are_counted_and_told_once(
    tmp_path: Path, config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def log(self, metrics: dict[str, float], step: int) -> None:
            raise OSError("disk full")

        def finish(self) -> None:
            raise OSError("disk full")

    sink = WandbSink(config.observability.wandb, "toy", tmp_path, {})
    sink._run = Broken()
    for step in (1, 2, 3):
        sink.log(step, {"actor/lr": 1.0})
    sink.close()
    assert sink.failures == 4
    assert [r.getMessage() for r in caplog.records] == [
        "W&B could not log (training goes on): OSError: disk full",
        "W&B: 4 calls failed; metrics.jsonl in the run folder is complete",
    ]
