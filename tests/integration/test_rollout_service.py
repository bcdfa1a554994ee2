"""The whole service under real Ray with a real SGLang server: flow, weight updates, and what it does about failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo_megatron.observability.metrics import is_declared
from rollout_service.config import ServiceSettings
from rollout_service.engine import EngineEndpoint
from rollout_service.ray_cluster import SERVICE_FILE, connect
from rollout_service.service import start_service
from rollout_service.weights_client import WeightsClient
from tests.integration.service_under_test import (
    MARK,
    PROXIES,
    call,
    check_batch,
    kill_server,
    make_models,
    publish,
    wait_until_gone,
)
from tests.service_settings import service_settings, write_sums
from tests.toy_models import hf_logprobs, load_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_models(tmp_path_factory.mktemp("models"))


class Running:
    def __init__(self, handle: Any, settings: ServiceSettings, mark: str, info: dict[str, Any]) -> None:
        self.handle = handle
        self.settings = settings
        self.mark = mark
        self.info = info

    def endpoint(self) -> EngineEndpoint:
        """The engine's, as the service names it for an update of the current weights."""
        endpoints = call(self.handle, "pause_for_update", 7)
        call(self.handle, "resume_after_update", 7, None)
        return endpoints[0]


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
            "engine": {"health_interval_s": 1.0, "max_restarts": 2},
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


def start_stranger(asynchronous: Running) -> subprocess.Popen[str]:
    """A program that tries to join the cluster with another token; Ray gives up after 20 s."""
    address = json.loads((Path(asynchronous.settings.run_dir) / SERVICE_FILE).read_text())["ray_address"]
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print('joined', ray.nodes())"
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
    del env["RAY_AUTH_TOKEN_PATH"]
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def stranger(asynchronous: Running) -> Iterator[subprocess.Popen[str]]:
    process = start_stranger(asynchronous)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("stranger")  # starts it; a later test looks at what became of it
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
    gone = shutil.copytree(models[0], tmp_path / "gone")
    publish(handle, gone, 4, None)
    for step in (5, 6):  # with both batches taken no slot is free, so nothing is running
        assert not call(handle, "next_batch", step)["republish"]
        assert len(call(handle, "ticket", step).groups) == settings.rollout.prompts_per_step
    shutil.rmtree(gone)
    kill_server(asynchronous.mark)
    assert call(handle, "next_batch", 7, timeout=120) == {"step": 7, "version": 4, "republish": True}
    with pytest.raises(Exception, match="wait for weights of version 4; publish them again"):
        call(handle, "ticket", 7)
    publish(handle, models[0], 4, None)
    publish(handle, models[1], 5, 5)
    assert not call(handle, "next_batch", 7)["republish"]
    assert {meta.oldest_version for meta in call(handle, "ticket", 7).groups} == {5}
    assert call(handle, "metrics")["rollout/engine/restarts"] == 1


def test_update_waits_for_an_engine_that_is_being_restarted(asynchronous: Running, models: list[Path]) -> None:
    handle = asynchronous.handle
    kill_server(asynchronous.mark)
    publish(handle, models[0], 6, 6)  # the restarted engine loads version 5 from disk and gets version 6 at once
    assert not call(handle, "next_batch", 8)["republish"]
    publish(handle, models[1], 7, 7)
    assert call(handle, "metrics")["rollout/engine/restarts"] == 2


def test_a_stranger_without_the_token_was_refused(asynchronous: Running, stranger: subprocess.Popen[str]) -> None:
    output, errors = stranger.communicate(timeout=60)
    assert stranger.returncode != 0
    assert "joined" not in output
    assert "authenticat" in errors.lower()


def test_samples_of_an_unpublished_version_are_refused(asynchronous: Running, models: list[Path]) -> None:
    handle = asynchronous.handle
    call(handle, "next_batch", 9)  # 7 is trained, 8 and 9 are not: every slot is taken and the engine is idle
    endpoint = asynchronous.endpoint()
    client = WeightsClient(endpoint, timeout_s=30.0)
    client.update_from_disk(str(models[0]), 99)  # behind the service's back
    with pytest.raises(Exception, match=r"weights of version \[99\], which this service did not publish"):
        call(handle, "evaluate", "held", 7)
    assert call(handle, "metrics")["rollout/engine/unpublished"] >= 2
    call(handle, "pause_for_update", 7)
    with pytest.raises(Exception, match="no engine holds weights of version 7"):
        call(handle, "resume_after_update", 7, None)


def test_engine_out_of_restarts_ends_the_service_with_the_cause(asynchronous: Running) -> None:
    """Last with this service: it fails."""
    handle = asynchronous.handle
    kill_server(asynchronous.mark)
    # Whichever looks first notices: the watch over the process, or the health probe.
    message = r"engine 0: (its server process ended|it failed \d+ health probes).*, and rollout.engine.max_restarts=2 is used up"
    for method, *args in (("until_failure",), ("next_batch", 20), ("ticket", 20), ("evaluate", "held", 7)):
        with pytest.raises(Exception, match=message):
            call(handle, method, *args)
