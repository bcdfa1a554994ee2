"""The transports `tensor` and `delta`: Megatron ranks in a TP2 x PP2 layout update a real SGLang server.

After each update the server's own checksum of its parameters is compared with the one it has after loading the Hugging Face
folder that the trainer wrote at that moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_megatron.resharder.shared_segment import HostSlots, clear_stale_segments
from dapo_megatron.resharder.transport import WeightSyncError
from rollout_service.engine import EngineError
from rollout_service.server_process import SglangServer
from rollout_service.weight_loader import SEGMENT_PREFIX, SHARED_MEMORY, SHARED_MEMORY_FORMAT
from rollout_service.weights_client import WeightsClient
from tests.integration.actor_ranks import Layout
from tests.integration.resharder_ranks import file_digests
from tests.integration.transport_ranks import FAULTS, publish_cases
from tests.ranks import run_ranks
from tests.service_settings import service_settings
from tests.toy_models import make_model

TENSOR = ["tensor-1", "tensor-2"]
DELTA = ["delta-first", "delta-sparse", "delta-dense", "delta-same", "delta-other-weights", "delta-wrong-byte"]
VERSIONS = dict(zip(TENSOR + DELTA, (1, 2, 3, 4, 5, 6, 8, 9), strict=True))


class Case:
    def __init__(self, client: WeightsClient, folder: Path, ranks: list[dict[str, Any]]) -> None:
        self.client = client
        self.folder = folder
        self.ranks = ranks
        self.first = ranks[0]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("transports")
    sizes = {"num_hidden_layers": 4}
    old = make_model(folder / "old", "qwen3", seed=1, **sizes)
    new = make_model(folder / "new", "qwen3", seed=2, **sizes)
    server = SglangServer(service_settings(folder, old, model_dtype="bfloat16"), engine_id=0, device="cpu")
    endpoint = server.start(str(old), version=0)
    try:
        arguments = (str(new), str(old), Layout(tp=2, pp=2), endpoint, str(folder / "exported"))
        ranks = run_ranks(4, publish_cases, *arguments, timeout_s=120.0)
        yield Case(WeightsClient(endpoint, 30.0), folder / "exported", ranks)
    finally:
        server.stop()


@pytest.mark.parametrize("name", TENSOR + DELTA)
def test_every_parameter_of_the_engine_is_the_trainers(name: str, case: Case) -> None:
    result = case.first[name]
    assert result["version"] == VERSIONS[name]
    case.client.update_from_disk(str(case.folder / name), 100)
    assert result["checksum"] == case.client.checksum()["per_engine_checksum"]
    assert [rank[name]["lost"] for rank in case.ranks] == [()] * 4


def test_the_updates_differ(case: Case) -> None:
    checksums = [case.first[name]["checksum"] for name in TENSOR + DELTA]
    # `delta-first` publishes what `tensor-2` did, `delta-same` what `delta-dense` did.
    assert len(set(checksums)) == len(checksums) - 2


def test_shared_memory_carries_every_byte_once_and_is_removed(case: Case) -> None:
    publishers, buckets, planned = case.first["plan"]
    assert len(publishers) == 4 and buckets > 8
    for name in TENSOR:
        assert case.first[name]["bytes"] == case.first[name]["planned"] == planned
        assert {"begin", "send", "end", "gather"} <= case.first[name]["seconds"].keys()
    assert [rank["segment_was_there"] for rank in case.ranks] == [True] * 4
    assert not [rank["segment"] for rank in case.ranks if (SHARED_MEMORY / rank["segment"]).exists()]


def test_delta_sends_what_changed(case: Case) -> None:
    buckets, planned = case.first["plan"][1:]
    density = {name: case.first[name]["density"] for name in DELTA}
    sent = {name: case.first[name]["bytes"] for name in DELTA}
    assert density["delta-first"] == 1.0
    assert planned < sent["delta-first"] < 1.3 * planned  # toy tensors: the headers weigh
    assert 0.01 < density["delta-sparse"] < 0.03
    assert sent["delta-sparse"] < 0.25 * planned
    assert density["delta-dense"] > 0.8
    assert sent["delta-dense"] < sent["delta-first"]
    assert density["delta-same"] == 0
    assert sent["delta-same"] < sent["delta-first"] - planned + 16 * buckets


def test_an_engine_with_other_weights_gets_everything_in_full(case: Case) -> None:
    assert case.first["plan"][2] < case.first["delta-other-weights"]["bytes"]
    assert case.first["delta-other-weights"]["density"] < 0.03


def test_after_a_wrong_byte_the_bucket_is_sent_in_full(case: Case) -> None:
    spoilt = [name for rank in case.ranks for name in rank["spoilt"]]
    assert len(spoilt) == 4  # one tensor of each publisher
    sparse, planned = case.first["delta-sparse"]["bytes"], case.first["plan"][2]
    assert sparse < case.first["delta-wrong-byte"]["bytes"] < sparse + 0.8 * planned


@pytest.mark.parametrize(("name", "engines", "faults"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_an_engine_that_fails_is_left_out_and_the_others_get_everything(
    name: str, engines: int, faults: dict[int, tuple[str, int]], case: Case
) -> None:
    result = case.first[name]
    assert set(result["engines"]) == set(range(engines)) - set(faults)
    assert len(result["lost"]) == len(faults)
    for engine in faults:
        assert any(f"engine {engine} (http" in reason and "turn " in reason for reason in result["lost"])
    for info in result["engines"].values():
        assert info["weight_version"] == "2"
        assert info["digests"] == file_digests(case.folder / name, "bfloat16")


def test_the_check_passes_what_is_right(case: Case) -> None:
    expected = case.first["delta-wrong-byte"]["checksum"]
    for name in ("check-delta", "check-tensor", "check-again"):
        assert case.first[name]["lost"] == ()
        assert case.first[name]["checksum"] == expected
        assert case.first[name]["version"] == 9


def test_the_check_finds_a_single_bit_in_an_engines_parameter(case: Case) -> None:
    for rank in case.ranks:
        assert "engine 0 (http" in rank["check-one-bit"]["error"]
        assert rank["check-one-bit"]["error"].endswith(": model.layers.2.mlp.down_proj.weight of rank 0")
    # The second transfer, which found it out, has put it right.
    assert case.first["check-one-bit"]["checksum"] == case.first["delta-wrong-byte"]["checksum"]


def test_the_check_finds_a_parameter_that_no_transfer_writes(case: Case) -> None:
    assert "weight_sync.check=never" in case.first["check-missing"]["error"]


def test_the_engine_refuses_what_is_not_a_segment(case: Case) -> None:
    case.client.begin_update()
    for source, reason in (
        (f"{SEGMENT_PREFIX}gone:0", "one host"),
        ("../etc/passwd:0", "not the name of a weight segment"),
    ):
        with pytest.raises(EngineError, match=reason):
            case.client.receive(["lm_head.weight"], ["bfloat16"], [[79, 48]], source, SHARED_MEMORY_FORMAT)
    case.client.end_update(101)


def test_segments_of_a_killed_run_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from dapo_megatron.resharder.shared_segment import HostSlots; "
        "slots = HostSlots(3, 5000, Path(sys.argv[1])); print(slots.path.name, flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        mine = HostSlots(0, 5000, tmp_path)
        assert (tmp_path / name).stat().st_size == 2 * 8192
        assert clear_stale_segments(tmp_path) == []
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert clear_stale_segments(tmp_path) == [name]
    assert [path.name for path in tmp_path.iterdir()] == [mine.path.name]
    mine.close()
    assert not list(tmp_path.iterdir())


def test_a_full_shared_memory_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"rank 2: .* MiB free.*weight_sync.bucket_mb"):
        HostSlots(2, 2**50, tmp_path)
    assert not list(tmp_path.iterdir())
