"""What the tests of the rollout service share: calls, a trainer's part of a step, checks of a batch, process hunting."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rollout_service.config import ServiceSettings
from rollout_service.sample import Ticket
from rollout_service.weights_client import WeightsClient
from tests.toy_models import hf_logprobs, load_model, make_model

MARK = "DAPO_TEST_MARK"
EOS_ID = 2
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


def make_models(folder: Path) -> list[Path]:
    """Two models of one shape; the weights of version v are those of `models[v % 2]`."""
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
        # The closing id may be the last that fits; only a response without it was cut.
        np.testing.assert_array_equal(meta.truncated, packed["response_ids"][offsets[1:] - 1] != EOS_ID)
        assert (meta.response_lengths[meta.truncated] == rollout.max_response_length).all()
        assert len(packed["prompt_ids"]) == meta.prompt_length
        assert packed["token_versions"].min() == meta.oldest_version
        for start, end in zip(offsets[:-1], offsets[1:], strict=True):
            ids = packed["prompt_ids"].tolist() + packed["response_ids"][start:end].tolist()
            by_model = np.stack([hf_logprobs(model, ids).numpy()[meta.prompt_length - 1 :] for model in loaded])
            expected = by_model[packed["token_versions"][start:end] % 2, np.arange(end - start)]
            np.testing.assert_allclose(packed["behaviour_logprobs"][start:end], expected, atol=1e-4)
    return trainer_version - min(meta.oldest_version for meta in ticket.groups)
