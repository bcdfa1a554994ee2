"""Real Megatron actors on four ranks: what they export and what they publish equals the loaded model, bit for bit.

The engines of these tests are `tests.weight_receiver`s; `test_sglang_engine` and `test_main_job` have real ones.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_convert.hf import HFReader
from tests.integration.actor_ranks import Layout
from tests.integration.resharder_ranks import Case, file_digests, run_cases
from tests.ranks import run_ranks
from tests.toy_models import VOCAB_SIZE, hf_logprobs, load_model, make_model

Results = list[dict[str, dict[str, Any]]]

LAYOUTS = {
    "qwen3": [Layout(tp=2, pp=2), Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=2, vp=2)],
    "llama-tied": [Layout(tp=2, pp=2), Layout(tp=4)],
    "qwen3_moe": [Layout(tp=2, ep=2, etp=1, sequence_parallel=True), Layout(pp=2, ep=2)],
    "deepseek_v3": [Layout(tp=2, ep=2, etp=2, sequence_parallel=True)],
}
EXPORTS = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
PUBLISHED = Layout(tp=2, pp=2)
SHARD_BYTES = 20_000
# Number of engines, and what some of them do at which bucket. In a broadcast to more than two, gloo lets engines pass data
# on, and one that passes data to an engine that hangs is lost with it.
FAULTS: dict[str, tuple[int, dict[int, tuple[str, int]]]] = {
    "one-dies": (3, {1: ("die", 5)}),
    "one-refuses": (3, {0: ("refuse", 3)}),
    "one-hangs": (2, {1: ("hang", 4)}),
    "dies-in-second-update": (3, {0: ("die", 20)}),
    "two-of-three": (3, {0: ("die", 2), 2: ("refuse", 7)}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_model(root / "qwen3", "qwen3", seed=1, num_hidden_layers=4),
        "llama-tied": make_model(root / "llama-tied", "llama", tie=True, seed=2, vocab_size=VOCAB_SIZE + 3),
        "qwen3_moe": make_model(root / "qwen3_moe", "qwen3_moe", seed=3, num_hidden_layers=4),
        "deepseek_v3": make_model(root / "deepseek_v3", "deepseek_v3", seed=4),
    }


@pytest.fixture(scope="module")
def export_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], export_dir: Path) -> Results:
    """All cases on each of four ranks; four processes serve every case."""
    cases = {f"{model}@{layout.name}": Case(str(folders[model]), layout) for model, layout in EXPORTS}
    moe = LAYOUTS["deepseek_v3"][0]
    cases["publish-moe"] = Case(str(folders["deepseek_v3"]), moe, engines=2, dtype="bfloat16")
    half = dataclasses.replace(moe, dtype="bfloat16")
    cases["bfloat16"] = Case(str(folders["deepseek_v3"]), half, dtype="bfloat16")
    qwen3 = str(folders["qwen3"])
    cases["small-files"] = Case(qwen3, PUBLISHED, shard_bytes=SHARD_BYTES)
    cases["not-shared"] = Case(qwen3, PUBLISHED, blind_rank=3)
    cases["full-disk"] = Case(qwen3, PUBLISHED, full_rank=2)
    cases["full-disk-not-shared"] = Case(qwen3, PUBLISHED, blind_rank=3, full_rank=0)
    cases["publish"] = Case(str(folders["qwen3"]), PUBLISHED, engines=2, dtype="bfloat16")
    cases["publish-two"] = Case(str(folders["qwen3"]), PUBLISHED, engines=1, max_publishers=1)
    for name, (engines, faults) in FAULTS.items():
        timeout_s = 4.0 if name == "one-hangs" else 60.0
        cases[name] = Case(str(folders["qwen3"]), PUBLISHED, engines=engines, faults=faults, timeout_s=timeout_s)
    cases["none-left"] = Case(str(folders["qwen3"]), PUBLISHED, engines=1, faults={0: ("die", 3)})
    return run_ranks(4, run_cases, cases, str(export_dir), timeout_s=240.0)


@pytest.mark.parametrize(("model", "layout"), EXPORTS, ids=[f"{model}-{layout.name}" for model, layout in EXPORTS])
def test_exported_folder_equals_the_loaded_one(
    model: str, layout: Layout, folders: dict[str, Path], export_dir: Path, results: Results
) -> None:
    case = f"{model}@{layout.name}"
    exported = export_dir / case / "model"
    assert file_digests(exported) == file_digests(folders[model])
    size = sum(path.stat().st_size for path in folders[model].glob("*.safetensors"))
    for rank in results:
        assert rank[case]["written"] == [rank[case]["plan_bytes"]] * 2
        assert rank[case]["lines"] == []
    assert 0.9 * size < results[0][case]["plan_bytes"] <= size
    assert len(results[0][case]["publishers"]) == 4  # every rank sends a share, to a file of its own
    expected = {path.name for path in folders[model].iterdir()} - {"model.safetensors"}
    expected |= {f"model-{i}-of-00004.safetensors" for i in ("00001", "00002", "00003", "00004")}
    assert {path.name for path in exported.iterdir()} == expected | {"model.safetensors.index.json"}
    assert [path.name for path in exported.parent.iterdir()] == ["model"]


def test_exported_files_are_bounded_and_load_in_transformers(
    folders: dict[str, Path], export_dir: Path, results: Results
) -> None:
    exported = export_dir / "small-files" / "model"
    files = sorted(exported.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) >= results[0]["small-files"]["plan_bytes"] / SHARD_BYTES
    # Only a tensor that is larger by itself makes a larger file.
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SHARD_BYTES
    ids = [5, 70, 33, 12, 12, 8, 41]
    assert torch.equal(hf_logprobs(load_model(exported), ids), hf_logprobs(load_model(folders["qwen3"]), ids))


def test_the_selection_bias_of_a_bfloat16_trainer_is_exported_in_float32(
    folders: dict[str, Path], export_dir: Path, results: Results
) -> None:
    exported = export_dir / "bfloat16" / "model"
    assert file_digests(exported, "bfloat16") == file_digests(folders["deepseek_v3"], "bfloat16")
    with HFReader(exported) as reader:
        dtypes = {name: reader.info(name).dtype for name in reader.names}
    assert {name for name, dtype in dtypes.items() if dtype == "F32"} == {
        name for name in dtypes if name.endswith("e_score_correction_bias")
    }
    assert set(dtypes.values()) == {"F32", "BF16"}
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_that_a_publisher_does_not_see_is_written_by_rank_zero(
    folders: dict[str, Path], export_dir: Path, results: Results
) -> None:
    place = export_dir / "not-shared"
    assert file_digests(place / "model") == file_digests(folders["qwen3"])
    assert [path.name for path in (place / "model").glob("*.safetensors")] == ["model.safetensors"]
    assert list((place / "elsewhere" / ".model.incomplete").iterdir()) == []
    (line,) = results[0]["not-shared"]["lines"]  # once for both updates
    assert f"{place} is not shared with rank 3 (" in line
    assert "rank 0 collects the weights" in line


@pytest.mark.parametrize(("case", "rank"), [("full-disk", 2), ("full-disk-not-shared", 0)])
def test_a_rank_that_cannot_write_is_named_everywhere_and_nothing_is_left(
    case: str, rank: int, export_dir: Path, results: Results
) -> None:
    errors = {result[case]["error"].replace("elsewhere/", "") for result in results}
    (error,) = errors
    assert f"rank {rank}: {export_dir / case}" in error
    assert re.search(r"model(-0000\d-of-00004)?\.safetensors: cannot write \S+: the file would be larger", error)
    assert error.count("rank ") == 1
    assert [path.name for path in (export_dir / case).iterdir() if path.name != "elsewhere"] == []


@pytest.mark.parametrize(
    ("case", "model", "engines", "publishers"),
    [("publish-moe", "deepseek_v3", 2, 4), ("publish", "qwen3", 2, 4), ("publish-two", "qwen3", 1, 2)],
)
def test_every_engine_gets_every_tensor_once_per_update(
    case: str, model: str, engines: int, publishers: int, folders: dict[str, Path], results: Results
) -> None:
    result = results[0][case]
    assert len(result["publishers"]) == publishers
    assert len(result["engines"]) == engines
    dtype = "float32" if case == "publish-two" else "bfloat16"
    for info in result["engines"].values():
        assert info["weight_version"] == "2"
        assert info["digests"] == file_digests(folders[model], dtype)
        assert info["bytes"] == 2 * result["plan_bytes"]
        assert info["groups"] == publishers  # the second update used the groups of the first
    for rank in results:
        for report in rank[case]["reports"]:
            assert report["bytes"] == report["planned_bytes"] == result["plan_bytes"]
            assert report["lost"] == ()
            assert {"begin", "send", "end", "gather"} <= report["seconds"].keys()
    first, second = result["reports"]
    assert "connect" in first["seconds"] and "connect" not in second["seconds"]


@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_fails_is_left_out_and_the_others_get_everything(
    name: str, folders: dict[str, Path], results: Results
) -> None:
    result = results[0][name]
    engines, faults = FAULTS[name]
    assert "error" not in result, result["error"]
    at_fault = set(faults)
    assert set(result["engines"]) == set(range(engines)) - at_fault
    for info in result["engines"].values():
        assert info["weight_version"] == "2"
        assert info["digests"] == file_digests(folders["qwen3"])
    lost = [reason for report in result["reports"] for reason in report["lost"]]
    assert len(lost) == len(at_fault)
    for engine in at_fault:
        (reason,) = (text for text in lost if f"engine {engine} " in text)
        assert "turn " in reason
    assert [rank[name]["reports"][0]["lost"] for rank in results] == [result["reports"][0]["lost"]] * 4
    limit = 15.0 if name == "one-hangs" else 8.0
    assert all(report["wall_s"] < limit for report in result["reports"])


def test_losing_the_last_engine_is_an_error_that_names_it(results: Results) -> None:
    for rank in results:
        assert "reached no engine" in rank["none-left"]["error"]
        assert "engine 0 (http://127.0.0.1:" in rank["none-left"]["error"]
