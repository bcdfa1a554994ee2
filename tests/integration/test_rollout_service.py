"""The whole service under real Ray with a real SGLang server: flow, weight updates, failures, and its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from dapo_megatron.observability.metrics import is_declared
from rollout_service.config import ServiceSettings
from rollout_service.ray_cluster import SERVICE_FILE, attach, connect
from rollout_service.sample import Ticket
from rollout_service.service import start_service
from rollout_service.weights_client import WeightsClient
from tests.service_settings import service_settings, write_sums
from tests.toy_models import hf_logprobs, load_model, make_model

MARK = "DAPO_TEST_MARK"
PROXIES = {
    "http_proxy": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "NO_PROXY": "10.0.0.0/8,localhost,[::1]",
}


def call(handle: Any, method: str, *args: Any, timeout: float = 90.0) -> Any:
    return ray.get(getattr(handle, method).remote(*args), timeout=timeout)


def marked(mark: str) -> dict[int, str]:
    """Living processes that inherited the mark in their environment: command by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes():
                continue
            if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_until_gone(mark: str, limit_s: float) -> dict[int, str]:
    deadline = time.monotonic() + limit_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def kill_server(mark: str) -> None:
    """SIGKILL the HTTP process of the only SGLang server."""
    pids = [pid for pid, command in marked(mark).items() if "-P" in command and "--model-path" in command]
    servers = [pid for pid in pids if "process_guard" not in marked(mark).get(pid, "process_guard")]
    assert len(servers) == 1, servers
    os.kill(servers[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape; the weights of version v are those of `models[v % 2]`."""
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / f"m{i}", "qwen3", seed=10 + i) for i in range(2)]


def publish(handle: Any, folder: Path, version: int, step: int | None) -> None:
    """What the trainer does after a step, with the disk transport."""
    endpoints = call(handle, "pause_for_update", version)
    assert [endpoint.engine_id for endpoint in endpoints] == [0]
    client = WeightsClient(endpoints[0], timeout_s=30.0)
    client.update_from_disk(str(folder), version)
    client.close()
    call(handle, "resume_after_update", version, step)


def check_batch(ticket: Ticket, settings: ServiceSettings, models: list[Path], trainer_version: int) -> int:
    """Sizes, lengths, versions and log-probs of a batch; returns the largest staleness."""
    rollout = settings.rollout
    assert len(ticket.groups) == len(ticket.refs) == rollout.prompts_per_step
    assert len({meta.order for meta in ticket.groups}) == rollout.prompts_per_step
    loaded = [load_model(folder) for folder in models]
    for meta, packed in zip(ticket.groups, ray.get(ticket.refs, timeout=30), strict=True):
        offsets = packed["offsets"]
        assert len(offsets) == rollout.n_samples_per_prompt + 1
        np.testing.assert_array_equal(np.diff(offsets), meta.response_lengths)
        assert meta.response_lengths.max() <= rollout.max_response_length
        np.testing.assert_array_equal(meta.truncated, meta.response_lengths == rollout.max_response_length)
        assert len(packed["prompt_ids"]) == meta.prompt_length
        assert packed["token_versions"].min() == meta.oldest_version
        for start, end in zip(offsets[:-1], offsets[1:], strict=True):
            ids = packed["prompt_ids"].tolist() + packed["response_ids"][start:end].tolist()
            by_model = np.stack([hf_logprobs(model, ids).numpy()[meta.prompt_length - 1 :] for model in loaded])
            expected = by_model[packed["token_versions"][start:end] % 2, np.arange(end - start)]
            np.testing.assert_allclose(packed["behaviour_logprobs"][start:end], expected, atol=1e-4)
    return trainer_version - min(meta.oldest_version for meta in ticket.groups)


class Running:
    def __init__(self, handle: Any, settings: ServiceSettings, mark: str, info: dict[str, Any]) -> None:
        self.handle = handle
        self.settings = settings
        self.mark = mark
        self.info = info


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> Iterator[Running]:
    """A service with S = 1 in a private cluster of this process, under hostile proxy variables."""
    run_dir = tmp_path_factory.mktemp("async")
    write_sums(run_dir / "train.jsonl", 11)
    write_sums(run_dir / "held.jsonl", 5)
    settings = service_settings(
        run_dir,
        models[0],
        rollout={
            "max_staleness": 1,
            "batch_timeout_s": 60.0,
            "max_group_attempts": 2,
            "engine": {"health_interval_s": 1.0},
            # A random model solves nothing: the first groups are dropped and replaced, the later ones let through.
            "filter_groups": {"policy": "accept", "window_groups": 5, "max_filtered_share": 0.5},
        },
        evaluation={"sets": {"held": {"path": str(run_dir / "held.jsonl"), "n": 2}}},
    )
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (PROXIES | {MARK: mark}).items():
            patch.setenv(name, value)
        cluster = connect(settings.ray, settings.run_name, run_dir, head=True)
        try:
            handle = start_service(settings)
            info = call(handle, "start", 0, timeout=150)
            yield Running(handle, settings, mark, info)
            call(handle, "shutdown")
        finally:
            cluster.close()
    left = {pid: command for pid, command in wait_until_gone(mark, 10).items() if pid != os.getpid()}
    assert not left


def test_start_tells_engines_and_data(asynchronous: Running) -> None:
    assert [engine.engine_id for engine in asynchronous.info["engines"]] == [0]
    assert asynchronous.info["engines"][0].url.startswith("http://127.0.0.1:")
    assert asynchronous.info["data"]["kept"] == 11
    assert call(asynchronous.handle, "start", 0) == asynchronous.info  # asking again changes nothing


def test_evaluation_uses_every_row_and_greedy_repeats_itself(asynchronous: Running) -> None:
    first, second = (call(asynchronous.handle, "evaluate", "held", 0) for _ in range(2))
    assert first["greedy"] == second["greedy"]
    assert first["greedy"]["prompts"] == 5
    assert first["greedy"]["n"] == 1
    assert first["sampled"]["n"] == 2
    assert first["sampled"]["acc/best@2"] >= first["sampled"]["acc"] == first["sampled"]["acc/mean@2"]
    assert first["greedy"]["response_length/max"] <= 24
    with pytest.raises(Exception, match=r"no evaluation set 'other'.*\['held'\]"):
        call(asynchronous.handle, "evaluate", "other", 0)
    with pytest.raises(Exception, match="the engines hold version 0, not 3"):
        call(asynchronous.handle, "evaluate", "held", 3)


def test_steps_with_staleness_one_stay_within_the_bound_and_update_weights(
    asynchronous: Running, models: list[Path]
) -> None:
    handle, settings = asynchronous.handle, asynchronous.settings
    seen: list[int] = []
    staleness = []
    for step in range(1, 5):
        assert call(handle, "next_batch", step) == {"step": step, "version": step - 1, "republish": False}
        ticket = call(handle, "ticket", step)
        again = call(handle, "ticket", step)
        assert [meta.order for meta in again.groups] == [meta.order for meta in ticket.groups]
        assert again.stats == ticket.stats
        assert all(is_declared(name) for name in ticket.stats), ticket.stats.keys()
        staleness.append(check_batch(ticket, settings, models, trainer_version=step - 1))
        seen += [meta.order for meta in ticket.groups]
        publish(handle, models[step % 2], step, step)
        sequence = [5, 9, 33, 12, 40, 41]
        probed = call(handle, "probe", [sequence], [2])
        np.testing.assert_allclose(
            probed[0][0], hf_logprobs(load_model(models[step % 2]), sequence)[1:].numpy(), atol=1e-4
        )
    assert len(set(seen)) == 16
    assert seen == sorted(seen)  # no window: admission order
    assert max(seen) > 15  # dropped groups were replaced by later prompts
    assert staleness[0] == 0
    assert max(staleness) == 1
    with pytest.raises(Exception, match="version 9 cannot be published after 4"):
        call(handle, "pause_for_update", 9)
    totals = call(handle, "metrics")
    assert totals["rollout/samples"] >= 48
    assert totals["rollout/engine/alive"] == 1
    assert all(is_declared(name) for name in totals)


def test_exported_folder_is_loaded_without_a_step(asynchronous: Running, models: list[Path], tmp_path: Path) -> None:
    handle = asynchronous.handle
    with pytest.raises(Exception, match="refused /update_weights_from_disk"):
        call(handle, "load_from_disk", str(tmp_path / "nothing"), 4)
    export = shutil.copytree(models[0], tmp_path / "export")
    call(handle, "load_from_disk", str(export), 4)
    assert call(handle, "evaluate", "held", 4)["greedy"]["prompts"] == 5
    sequence = [5, 9, 33, 12]
    expected = hf_logprobs(load_model(models[0]), sequence).numpy()
    np.testing.assert_allclose(call(handle, "probe", [sequence], [1])[0][0], expected, atol=1e-4)


def test_killed_engine_without_weights_on_disk_waits_until_they_are_published_again(
    asynchronous: Running, models: list[Path], tmp_path: Path
) -> None:
    handle, settings = asynchronous.handle, asynchronous.settings
    # The export of the test before was deleted with its folder or is; make sure that nothing is left to restart from.
    gone = shutil.copytree(models[0], tmp_path / "gone")
    publish(handle, gone, 4, None)
    call(handle, "next_batch", 5)
    ticket = call(handle, "ticket", 5)
    shutil.rmtree(gone)
    kill_server(asynchronous.mark)
    reply: dict[str, Any] = {}
    publish_deadline = time.monotonic() + 90
    # Finished groups may still fill a batch; steps go on only with engines, so none is published here.
    while not reply.get("republish") and time.monotonic() < publish_deadline:
        reply = call(handle, "next_batch", 6)
        if not reply["republish"]:
            break
    if not reply["republish"]:  # batch 6 was complete before the engine died
        deadline = time.monotonic() + 90
        while call(handle, "metrics")["rollout/engine/restarts"] < 1 and time.monotonic() < deadline:
            time.sleep(0.5)
    endpoints = call(handle, "pause_for_update", 4)
    while not endpoints and time.monotonic() < publish_deadline:
        time.sleep(0.5)
        endpoints = call(handle, "pause_for_update", 4)
    client = WeightsClient(endpoints[0], timeout_s=30.0)
    client.update_from_disk(str(models[0]), 4)
    call(handle, "resume_after_update", 4, None)
    assert not call(handle, "next_batch", 6)["republish"]
    assert len(call(handle, "ticket", 6).groups) == settings.rollout.prompts_per_step
    assert len(ticket.groups) == settings.rollout.prompts_per_step
    assert call(handle, "metrics")["rollout/engine/restarts"] == 1


def test_samples_of_an_unpublished_version_stop_the_run_with_the_cause(
    asynchronous: Running, models: list[Path]
) -> None:
    """Last with this service: it fails."""
    handle = asynchronous.handle
    endpoints = call(handle, "pause_for_update", 5)
    client = WeightsClient(endpoints[0], timeout_s=30.0)
    client.update_from_disk(str(models[1]), 5)
    call(handle, "resume_after_update", 5, 5)
    client.update_from_disk(str(models[0]), 99)  # behind the service's back
    message = r"weights of version \[99\], which this service did not publish"
    with pytest.raises(Exception, match=message):
        for step in range(7, 10):
            call(handle, "next_batch", step)
            call(handle, "ticket", step)
    with pytest.raises(Exception, match=message):
        call(handle, "next_batch", 20)
    with pytest.raises(Exception, match=message):
        call(handle, "until_failure")


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
        assert totals["rollout/engine/restarts"] == 1
        assert totals["rollout/engine/requeued"] >= 1
        ray.shutdown()
        assert len(marked(launched.mark)) >= 6  # launcher, Ray, actors, server, reward workers
        launched.process.kill()
        left = wait_until_gone(launched.mark, 10)
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
