"""Life and death of the service's processes: a killed engine, a killed launcher, an orderly end, a second run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
import ray

from rollout_service.config import ServiceSettings
from rollout_service.ray_cluster import SERVICE_FILE, attach
from tests.integration.service_under_test import (
    MARK,
    PROXIES,
    call,
    check_batch,
    kill_server,
    make_models,
    marked,
    publish,
    wait_until_gone,
)
from tests.service_settings import service_settings, write_sums


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_models(tmp_path_factory.mktemp("models"))


class Launched:
    """`service_driver.py` in a process of its own."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.run_dir = Path(settings.run_dir)
        self.mark = uuid.uuid4().hex
        file = self.run_dir / "settings.json"
        file.write_text(settings.model_dump_json())
        driver = Path(__file__).with_name("service_driver.py")
        env = os.environ | PROXIES | {MARK: self.mark, "PYTHONPATH": str(driver.parents[2])}
        self.log = (self.run_dir / "launcher.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(driver), str(file)], env=env, stdout=self.log, stderr=self.log
        )

    def wait_ready(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.run_dir / "launcher.log").read_text()
            try:
                announced = json.loads((self.run_dir / SERVICE_FILE).read_text())
                if announced["ready"] and announced["pid"] == self.process.pid:  # not what a killed run left
                    return
            except FileNotFoundError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready in {limit_s} s: {(self.run_dir / 'launcher.log').read_text()}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()
        for pid in marked(self.mark):
            os.kill(pid, signal.SIGKILL)


def synchronous_settings(run_dir: Path, model: Path) -> ServiceSettings:
    run_dir.mkdir()
    write_sums(run_dir / "train.jsonl", 11)
    return service_settings(
        run_dir,
        model,
        rollout={
            "max_staleness": 0,
            "max_response_length": 300,
            "batch_timeout_s": 120.0,
            "engine": {"health_interval_s": 1.0},
            "filter_groups": {"enable": False},
        },
    )


def test_synchronous_service_survives_its_engine_and_leaves_nothing_when_killed(
    tmp_path: Path, models: list[Path]
) -> None:
    settings = synchronous_settings(tmp_path / "sync", models[0])
    launched = Launched(settings)
    try:
        handle = attach(settings.run_dir, timeout_s=60)
        call(handle, "start", 0, timeout=150)
        kill_server(launched.mark)  # while the first groups are generated
        for step in range(1, 3):
            call(handle, "next_batch", step, timeout=120)
            ticket = call(handle, "ticket", step)
            assert check_batch(ticket, settings, models, trainer_version=step - 1) == 0
            assert call(handle, "metrics")["rollout/queue/free"] == 0
            assert all(meta.newest_version == meta.oldest_version == step - 1 for meta in ticket.groups)
            publish(handle, models[step % 2], step, step)
        totals = call(handle, "metrics")
        assert totals["rollout/engine/restarts"] >= 1
        assert totals["rollout/engine/requeued"] >= 1
        ray.shutdown()
        assert len(marked(launched.mark)) >= 6  # launcher, Ray, actors, server, reward workers
        launched.process.kill()
        left = wait_until_gone(launched.mark, 20)
        assert not left, left
        assert not (launched.run_dir / SERVICE_FILE).exists()
        assert not list(Path(tempfile.gettempdir()).glob(f"dapo-ray-{launched.process.pid}-*"))
    finally:
        ray.shutdown()
        launched.end()

    # A second run in the same place starts at once and ends in order.
    second = Launched(settings)
    try:
        second.wait_ready(90)
        began = time.monotonic()
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(timeout=20) == 0, (second.run_dir / "launcher.log").read_text()
        assert time.monotonic() - began < 15
        left = wait_until_gone(second.mark, 5)
        assert not left, left
        assert not (second.run_dir / SERVICE_FILE).exists()
        output = (second.run_dir / "launcher.log").read_text()
        assert output == f"rollout service ready: {settings.run_dir}\n"
    finally:
        second.end()
