"""One real SGLang server and its two clients, on toy models."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import requests
import torch
from safetensors.torch import load_file

from dapo_megatron.resharder.process_group import create_publisher_group, destroy_publisher_group
from rollout_service.engine import (
    EngineClient,
    EngineEndpoint,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    vocabulary_size,
)
from rollout_service.process_guard import descendants
from rollout_service.sample import FinishReason
from rollout_service.server_process import SglangServer
from rollout_service.weights_client import WeightsClient
from tests.integration.actor_ranks import Layout, score_sequences
from tests.ranks import run_ranks
from tests.service_settings import service_settings
from tests.toy_models import hf_logprobs, load_model, make_model

T = TypeVar("T")
PROMPT = [22, 18, 21, 23, 66, 61, 58]
OLD, NEW = "old", "new"


class Served:
    """The server, its endpoint, and the two models (`old` is loaded at the start, as version 0)."""

    def __init__(self, server: SglangServer, endpoint: EngineEndpoint, folders: dict[str, Path]) -> None:
        self.server = server
        self.endpoint = endpoint
        self.folders = folders
        self.models = {name: load_model(folder) for name, folder in folders.items()}
        self.weights = WeightsClient(endpoint, timeout_s=30.0)
        self.vocab_size = vocabulary_size(str(folders[OLD]))

    def run(self, work: Callable[[EngineClient], Awaitable[T]], request_timeout_s: float = 60.0) -> T:
        """Run `work` with a client of its own, in an event loop of its own."""

        async def inside() -> T:
            client = EngineClient(self.endpoint, self.vocab_size, request_timeout_s, control_timeout_s=30.0)
            try:
                return await work(client)
            finally:
                await client.close()

        return asyncio.run(inside())

    def load(self, name: str, version: int) -> None:
        self.weights.update_from_disk(str(self.folders[name]), version)

    def expected(self, name: str, response: np.ndarray, temperature: float) -> np.ndarray:
        logprobs = hf_logprobs(self.models[name], PROMPT + response.tolist(), temperature)
        return logprobs[len(PROMPT) - 1 :].numpy()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("engine")
    folders = {OLD: make_model(folder / OLD, "qwen3", seed=1), NEW: make_model(folder / NEW, "qwen3", seed=2)}
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"), "http://127.0.0.1:9")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in proxies.items():  # every call of this module must go past them
            patch.setenv(name, value)
        patch.setenv("NO_PROXY", "10.0.0.0/8,localhost,[::1]")
        server = SglangServer(service_settings(folder, folders[OLD]), engine_id=0, device="cpu")
        endpoint = server.start(str(folders[OLD]), version=0)
        try:
            yield Served(server, endpoint, folders)
        finally:
            server.stop()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_output_logprobs_equal_transformers_after_temperature(served: Served, temperature: float) -> None:
    served.load(OLD, 0)
    sampling = {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True}
    got = served.run(lambda client: client.generate(PROMPT, sampling, f"t{temperature}"))
    assert len(got.ids) == 40
    assert got.finish_reason is FinishReason.LENGTH
    assert got.versions == ((0, 40),)
    np.testing.assert_allclose(got.logprobs, served.expected(OLD, got.ids, temperature), atol=1e-4)


def test_logprobs_and_entropy_under_temperature_equal_the_trainers(served: Served) -> None:
    served.load(OLD, 0)
    temperature = 0.7
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": temperature, "max_new_tokens": 40, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": served.vocab_size,  # all of them, so that the entropy can be had
    }
    session = requests.Session()
    session.trust_env = False
    reply = session.post(
        f"{served.endpoint.url}/generate", json=body, headers=served.endpoint.headers, timeout=60
    ).json()
    chosen = np.array([triple[0] for triple in reply["meta_info"]["output_token_logprobs"]])
    everything = np.array([[t[0] for t in row] for row in reply["meta_info"]["output_top_logprobs"]])
    assert everything.shape == (40, served.vocab_size)
    np.testing.assert_allclose(np.exp(everything).sum(1), 1.0, atol=1e-5)
    entropy = -(np.exp(everything) * everything).sum(1)
    layout = Layout(tp=2, sequence_parallel=True)
    scored = run_ranks(
        2, score_sequences, str(served.folders[OLD]), layout, [(PROMPT, reply["output_ids"])], temperature
    )
    for logprobs, entropies in scored:
        np.testing.assert_allclose(logprobs, chosen, atol=1e-4)
        np.testing.assert_allclose(entropies, entropy, atol=1e-4)


def test_input_logprobs_equal_transformers_without_temperature(served: Served) -> None:
    served.load(OLD, 0)
    ids = PROMPT + [5, 9, served.vocab_size - 1, 33, 0, 70, 12]  # SGLang names the last id of the vocabulary otherwise
    got = served.run(lambda client: client.input_logprobs(ids, start=4))
    assert got.shape == (len(ids) - 4,)
    np.testing.assert_allclose(got, hf_logprobs(served.models[OLD], ids)[3:].numpy(), atol=1e-4)


def test_stop_token_is_part_of_the_response(served: Served) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 300, "stop_token_ids": list(range(40, 79))}
    got = served.run(lambda client: client.generate(PROMPT, sampling, "stop"))
    assert got.finish_reason is FinishReason.STOP
    assert got.ids[-1] >= 40
    assert (got.ids[:-1] < 40).all()


def test_a_stop_string_keeps_ids_and_logprobs_aligned(served: Served) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 300, "stop": ["a", "e", "i", "1", "2", "3"]}
    got = served.run(lambda client: client.generate(PROMPT, sampling, "stop-string"))
    assert got.finish_reason is FinishReason.STOP
    assert len(got.ids) == len(got.logprobs) >= 1


def test_paused_request_goes_on_with_new_weights_and_records_both_versions(served: Served) -> None:
    served.load(OLD, 0)

    async def work(client: EngineClient) -> Any:
        sampling = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
        running = asyncio.create_task(client.generate(PROMPT, sampling, "paused"))
        await asyncio.sleep(0.5)
        await client.pause("retract")
        await client.load_from_disk(str(served.folders[NEW]), 1)
        await client.flush_cache()
        assert not running.done()
        await client.resume()
        return await running

    got = served.run(work)
    assert len(got.ids) == 400
    assert [version for version, _ in got.versions] == [0, 1]
    before = got.versions[0][1]
    assert 1 <= before < 400
    old, new = (served.expected(name, got.ids, 1.0) for name in (OLD, NEW))
    np.testing.assert_allclose(got.logprobs[:before], old[:before], atol=1e-4)
    np.testing.assert_allclose(got.logprobs[before:], new[before:], atol=1e-4)
    assert np.abs(old[before:] - new[before:]).max() > 0.1  # the two models differ visibly


def test_deadline_stands_still_while_paused(served: Served) -> None:
    async def work(client: EngineClient) -> int:
        sampling = {"temperature": 1.0, "max_new_tokens": 200, "ignore_eos": True}
        running = asyncio.create_task(client.generate(PROMPT, sampling, "patient"))
        await asyncio.sleep(0.1)
        await client.pause("retract")
        await asyncio.sleep(3.0)
        await client.resume()
        return len((await running).ids)

    assert served.run(work, request_timeout_s=2.5) == 200


def test_late_answer_is_an_error_that_names_engine_and_request(served: Served) -> None:
    async def work(client: EngineClient) -> None:
        await client.generate(PROMPT, {"max_new_tokens": 450, "ignore_eos": True}, "too-slow")

    with pytest.raises(EngineTimeout, match=r"engine 0 .* did not finish too-slow in 0.2 s"):
        served.run(work, request_timeout_s=0.2)


def test_refused_request_is_an_error_with_the_servers_reason(served: Served) -> None:
    with pytest.raises(EngineError, match="maximum context length of 512"):
        served.run(lambda client: client.generate(PROMPT, {"max_new_tokens": 5000}, "too-long"))


def test_wrong_key_and_missing_server_are_errors(served: Served) -> None:
    wrong = EngineEndpoint(0, served.endpoint.url, "wrong", 1, alive=True)
    with pytest.raises(EngineError, match="401"):
        WeightsClient(wrong, 5.0).begin_update()
    nobody = EngineEndpoint(3, f"http://127.0.0.1:{free_port()}", None, 1, alive=True)
    with pytest.raises(EngineError, match="engine 3 "):
        WeightsClient(nobody, 5.0).server_info()

    async def ask() -> None:
        client = EngineClient(nobody, 79, 5.0, 5.0)
        try:
            await client.generate(PROMPT, {"max_new_tokens": 1}, "nobody")
        finally:
            await client.close()

    with pytest.raises(EngineUnavailable, match="engine 3 "):
        asyncio.run(ask())


def test_bad_folder_is_refused_and_the_engine_goes_on(served: Served, tmp_path: Path) -> None:
    served.load(OLD, 0)
    with pytest.raises(EngineError, match="refused /update_weights_from_disk with 400"):
        served.weights.update_from_disk(str(tmp_path / "nothing"), 5)
    assert served.weights.weight_version() == 0
    got = served.run(lambda client: client.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 8}, "after"))
    np.testing.assert_allclose(got.logprobs, served.expected(OLD, got.ids, 1.0), atol=1e-4)


def test_receiving_outside_an_update_is_refused_at_once(served: Served) -> None:
    with pytest.raises(EngineError, match="begin_weight_update"):
        served.weights.receive(["lm_head.weight"], ["float32"], [[79, 48]], "no-such-group")
    with pytest.raises(EngineError, match="no weight-update session is open"):
        served.weights.end_update(9)


def test_distributed_update_over_gloo_gives_the_engine_the_new_weights(served: Served) -> None:
    served.load(OLD, 0)
    checksum_old = served.weights.checksum()["per_engine_checksum"]
    tensors = load_file(served.folders[NEW] / "model.safetensors")
    names = sorted(tensors)
    buckets = [names[::2], names[1::2]]
    port, group_name = free_port(), "update-1"
    replies: list[EngineError] = []

    def engine_side(call: Callable[[], None]) -> threading.Thread:
        def catch() -> None:
            try:
                call()
            except EngineError as error:
                replies.append(error)

        thread = threading.Thread(target=catch)
        thread.start()
        return thread

    async def update(client: EngineClient) -> Any:
        sampling = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}
        running = asyncio.create_task(client.generate(PROMPT, sampling, "interrupted"))
        await asyncio.sleep(0.4)
        await client.pause("retract")
        await asyncio.to_thread(publish)
        await client.flush_cache()
        await client.resume()
        return await running

    def no_refusal() -> None:
        if replies:
            raise replies[0]

    def publish() -> None:
        join = engine_side(lambda: served.weights.init_group("127.0.0.1", port, 1, 2, group_name, "gloo"))
        group = create_publisher_group("127.0.0.1", port, 0, 2, group_name, "gloo", timeout_s=30.0, abort=no_refusal)
        join.join()
        assert not replies
        try:
            served.weights.begin_update()
            for bucket in buckets:
                dtypes, shapes = ["float32"] * len(bucket), [list(tensors[name].shape) for name in bucket]
                receive = engine_side(lambda b=bucket, d=dtypes, s=shapes: served.weights.receive(b, d, s, group_name))
                for name in bucket:
                    torch.distributed.broadcast(tensors[name].contiguous(), src=0, group=group)
                receive.join()
                assert not replies
            assert served.weights.weight_version() == 0
            served.weights.end_update(3)
        finally:
            served.weights.destroy_group(group_name)
            destroy_publisher_group(group)

    got = served.run(update)
    assert served.weights.weight_version() == 3
    assert served.weights.checksum()["per_engine_checksum"] != checksum_old
    assert [version for version, _ in got.versions] == [0, 3]
    before = got.versions[0][1]
    np.testing.assert_allclose(got.logprobs[:before], served.expected(OLD, got.ids, 1.0)[:before], atol=1e-4)
    np.testing.assert_allclose(got.logprobs[before:], served.expected(NEW, got.ids, 1.0)[before:], atol=1e-4)
    after = served.run(lambda client: client.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 30}, "new"))
    assert {version for version, _ in after.versions} == {3}
    np.testing.assert_allclose(after.logprobs, served.expected(NEW, after.ids, 1.0), atol=1e-4)


def test_an_engine_that_refuses_to_join_ends_the_publishers_wait(served: Served) -> None:
    def refused() -> None:
        raise EngineError("engine 0 refused to join")

    began = time.monotonic()
    with pytest.raises(EngineError, match="refused to join"):
        create_publisher_group("127.0.0.1", free_port(), 0, 2, "nobody-comes", "gloo", timeout_s=20.0, abort=refused)
    assert time.monotonic() - began < 5


def test_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = SglangServer(service_settings(tmp_path, tmp_path / "missing"), engine_id=4, device="cpu")
    with pytest.raises(EngineError, match=r"engine 4 ended with status .* while starting[\s\S]*engine_4.log"):
        server.start(str(tmp_path / "missing"), version=0)
    assert server.poll() == -1


def test_killing_the_guard_ends_the_server_and_its_children(served: Served) -> None:
    """Last in this file: it ends the module's server."""
    assert served.server._process is not None
    guard = served.server._process.pid
    tree = descendants(guard)
    assert len(tree) >= 3  # HTTP server, scheduler, detokenizer
    os.kill(guard, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in tree if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    assert not alive, subprocess.run(["ps", "-fp", ",".join(map(str, alive))], capture_output=True, text=True).stdout


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
