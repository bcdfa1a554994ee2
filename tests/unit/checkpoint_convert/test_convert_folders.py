"""Whole folders through the converter: round trips of every family, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from checkpoint_convert import torch_dist_writer
from checkpoint_convert.architecture import read_architecture
from checkpoint_convert.convert import Options, hf_to_megatron, megatron_to_hf
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.mapped_files import MappedFiles
from checkpoint_convert.mapping import build_mapping, hf_shapes
from checkpoint_convert.sources import open_megatron
from checkpoint_convert.torch_dist import TorchDistReader
from tests.hf_folders import assert_same_weights
from tests.toy_models import FAMILIES, make_model

FAST = Options(durable=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_model(root / "qwen3", "qwen3", vocab_size=77, num_hidden_layers=3),
        "qwen2-tied": make_model(root / "qwen2-tied", "qwen2", tie=True, vocab_size=77),
        "llama": make_model(root / "llama", "llama", seed=2),
    }


def cast_folder(source: Path, target: Path, dtype: torch.dtype) -> Path:
    shutil.copytree(source, target)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def nothing_left(out: Path) -> bool:
    return not [path for path in out.parent.iterdir() if path.name.strip(".").startswith(out.name)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_round_trip_is_bit_identical_for_every_family(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    source = make_model(tmp_path / "float32", family, seed=3, vocab_size=77)
    if dtype != torch.float32:
        source = cast_folder(source, tmp_path / "cast", dtype)
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", FAST)
    out = megatron_to_hf(checkpoint, tmp_path / "out", FAST, max_shard_bytes=60_000)
    assert_same_weights(source, out)
    assert len(list(out.glob("*.safetensors"))) > 1
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert read_architecture(out) == read_architecture(source)


def test_everything_that_belongs_to_the_model_comes_out(tmp_path: Path, models: dict[str, Path]) -> None:
    source = shutil.copytree(models["qwen3"], tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.bin").write_text("not the model's")
    out = megatron_to_hf(hf_to_megatron(source, tmp_path / "megatron", FAST), tmp_path / "out", FAST)
    expected = {path.name for path in source.iterdir()} - {"optimizer.bin"}
    assert {path.name for path in out.iterdir()} == expected
    for name in expected - {"config.json", "model.safetensors"}:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_dtype_is_cast_and_buffers_keep_float32(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "glm4_moe")
    checkpoint = hf_to_megatron(source, tmp_path / "megatron", Options(dtype=torch.bfloat16, durable=False))
    stored = TorchDistReader(checkpoint, MappedFiles()).tensors
    kept = {key for key, tensor in stored.items() if tensor.dtype == torch.float32}
    assert kept and all(key.endswith("router.expert_bias") for key in kept)
    assert json.loads((checkpoint / "hf/config.json").read_text())["dtype"] == "bfloat16"
    back = megatron_to_hf(checkpoint, tmp_path / "back", Options(dtype=torch.float32, durable=False))
    expected = load_file(source / "model.safetensors")
    for name, tensor in load_file(back / "model.safetensors").items():
        if not name.endswith("e_score_correction_bias"):
            expected[name] = expected[name].to(torch.bfloat16).float()
        assert torch.equal(tensor, expected[name]), name


def test_a_number_too_large_for_float16_is_an_error(tmp_path: Path, models: dict[str, Path]) -> None:
    source = shutil.copytree(models["llama"], tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*float16 cannot hold"):
        hf_to_megatron(source, tmp_path / "out", Options(dtype=torch.float16, durable=False))
    assert nothing_left(tmp_path / "out")


def test_torch_reads_every_record(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # The large-file form of the archive must be readable, too; here everything takes it.
    for limit in (torch_dist_writer._ZIP64_FROM, 0):
        monkeypatch.setattr(torch_dist_writer, "_ZIP64_FROM", limit)
        folder = hf_to_megatron(models["qwen3"], tmp_path / f"megatron-{limit}", FAST)
        metadata = FileSystemReader(folder).read_metadata()
        state = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp_load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        hf = load_file(models["qwen3"] / "model.safetensors")
        for layer in range(3):
            prefix = f"model.layers.{layer}."
            fused = torch.cat([hf[prefix + "mlp.gate_proj.weight"], hf[prefix + "mlp.up_proj.weight"]])
            assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"][layer], fused)
            assert torch.equal(
                state["decoder.layers.self_attention.linear_proj.weight"][layer], hf[prefix + "self_attn.o_proj.weight"]
            )
        assert torch.equal(state["output_layer.weight"], hf["lm_head.weight"])
        index = metadata.storage_data
        for record in {(r.relative_path, r.offset, r.length) for r in index.values()}:
            data = (folder / record[0]).read_bytes()[record[1] : record[1] + record[2]]
            (tmp_path / "record.zip").write_bytes(data)
            with zipfile.ZipFile(tmp_path / "record.zip") as archive:
                assert archive.testzip() is None  # checksums are right


def test_no_tensor_is_written_twice(tmp_path: Path, models: dict[str, Path]) -> None:
    folder = hf_to_megatron(models["qwen3"], tmp_path / "megatron", FAST)
    size = sum(torch.Size(shape).numel() * 4 for shape in hf_shapes(build_mapping(read_architecture(models["qwen3"]), "local")).values())  # fmt: skip
    written = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    records = len({(r.relative_path, r.offset) for r in FileSystemReader(folder).read_metadata().storage_data.values()})
    assert size < written < size + 1500 * records


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def test_pickles_of_a_checkpoint_run_nothing(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = hf_to_megatron(models["qwen2-tied"], tmp_path / "megatron", FAST)
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = Harmful()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_same_weights(models["qwen2-tied"], megatron_to_hf(folder, tmp_path / "out", FAST))
    assert not (tmp_path / "harmed").exists()


def test_a_training_checkpoint_is_read_where_the_trainer_puts_it(tmp_path: Path, models: dict[str, Path]) -> None:
    step = tmp_path / "step_100"
    folder = hf_to_megatron(models["qwen2-tied"], step / "model", FAST)
    (folder / "hf").rename(step / "hf")
    # Prefixed keys, and an optimizer's beside them.
    metadata = FileSystemReader(folder).read_metadata()
    for table in (metadata.state_dict_metadata, metadata.storage_data):
        for key in list(table):
            name = key if isinstance(key, str) else key.fqn
            renamed = f"model.{name}" if isinstance(key, str) else type(key)(f"model.{name}", key.offset)
            table[renamed] = table.pop(key)
    metadata.state_dict_metadata["optimizer.state.exp_avg.decoder.x"] = metadata.state_dict_metadata[
        "model.decoder.final_layernorm.weight"
    ]
    for key in list(metadata.storage_data):
        if key.fqn == "model.decoder.final_layernorm.weight":
            metadata.storage_data[type(key)("optimizer.state.exp_avg.decoder.x", key.offset)] = metadata.storage_data[
                key
            ]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_same_weights(models["qwen2-tied"], megatron_to_hf(step, tmp_path / "out", FAST))


def truncate(path: Path, to: int) -> None:
    with path.open("r+b") as file:
        file.truncate(to)


def test_faults_of_a_hf_folder_name_tensor_and_file(tmp_path: Path, models: dict[str, Path]) -> None:
    def broken(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = shutil.copytree(models["llama"], tmp_path / name)
        return folder, load_file(folder / "model.safetensors")

    def refused(folder: Path, pattern: str) -> None:
        with pytest.raises(CheckpointError, match=pattern):
            hf_to_megatron(folder, tmp_path / "out", FAST)
        assert nothing_left(tmp_path / "out")

    folder, tensors = broken("missing")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"missing: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing")

    folder, tensors = broken("extra")
    tensors["model.layers.0.mlp.gate_proj.bias"] = torch.zeros(112)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"model\.safetensors: tensor model\.layers\.0\.mlp\.gate_proj\.bias is not part of this model")

    folder, _ = broken("hidden-size")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    refused(folder, r"model\.safetensors: tensor .* has shape .*48.*, config\.json says .*64")

    folder, _ = broken("truncated")
    truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 100)
    refused(folder, r"truncated/model\.safetensors: truncated: tensor \S+ ends at data byte")

    folder, _ = broken("header")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8:12] = b"\0\1\2\3"
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, r"header/model\.safetensors: corrupt header")

    folder, tensors = broken("mixed")
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, r"mixed/model\.safetensors: .*k_proj.*bfloat16.*--dtype")


def test_faults_of_a_megatron_checkpoint_name_tensor_and_file(tmp_path: Path, models: dict[str, Path]) -> None:
    whole = hf_to_megatron(models["qwen3"], tmp_path / "whole", FAST)

    def broken(name: str) -> Path:
        return shutil.copytree(whole, tmp_path / name)

    def refused(folder: Path, pattern: str, hf_source: Path | None = None) -> None:
        with pytest.raises(CheckpointError, match=pattern):
            megatron_to_hf(folder, tmp_path / "out", FAST, hf_source)
        assert nothing_left(tmp_path / "out")

    folder = broken("truncated")
    truncate(folder / "__0_0.distcp", (folder / "__0_0.distcp").stat().st_size - 8)
    refused(folder, r"__0_0\.distcp: truncated: \d+ bytes, but output_layer\.weight ends at byte")

    folder = broken("no-file")
    (folder / "__0_0.distcp").unlink()
    refused(folder, r"__0_0\.distcp: missing, though the index says that it holds")

    folder = broken("no-index")
    (folder / ".metadata").unlink()
    refused(folder, r"\.metadata: not found; the checkpoint is incomplete")

    folder = broken("bad-index")
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:500])
    refused(folder, r"\.metadata: corrupt index")

    folder = broken("bad-record")
    record = next(
        info
        for index, info in FileSystemReader(folder).read_metadata().storage_data.items()
        if index.fqn == "decoder.final_layernorm.weight"
    )
    with (folder / record.relative_path).open("r+b") as file:
        file.seek(record.offset + record.length - 22)
        file.write(b"\0" * 22)
    refused(folder, r"__0_0\.distcp: the record of decoder\.final_layernorm\.weight at byte \d+ is corrupt")

    folder = broken("tied")
    config = json.loads((folder / "hf/config.json").read_text())
    (folder / "hf/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused(folder, r"output_layer\.weight is not part of .*tie_word_embeddings must be false")

    folder = broken("layers")
    (folder / "hf/config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    refused(folder, r"has shape \[3, .*config\.json says \[2, ")

    refused(whole, r"are different models: .*family is qwen3 and llama", models["llama"])
    folder = broken("no-hf")
    shutil.rmtree(folder / "hf")
    refused(folder, r"--hf-source")
    out = megatron_to_hf(folder, tmp_path / "out", FAST, models["qwen3"])
    assert_same_weights(models["qwen3"], out)


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path, models: dict[str, Path]) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"__0_0\.distcp: cannot write decoder\.layers\.\S+ .*larger than.*allows"
        ):
            hf_to_megatron(models["qwen3"], tmp_path / "out", FAST)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert nothing_left(tmp_path / "out")


def test_too_little_room_is_noticed_before_anything_is_written(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"out: 0\.00 GB are to be written, but its disk has only 0\.00 GB free"):
        hf_to_megatron(models["qwen3"], tmp_path / "out", FAST)
    assert nothing_left(tmp_path / "out")


def test_what_is_in_the_way_is_replaced_only_when_asked(tmp_path: Path, models: dict[str, Path]) -> None:
    out = hf_to_megatron(models["qwen3"], tmp_path / "out", FAST)
    with pytest.raises(CheckpointError, match="already exists.*--overwrite"):
        hf_to_megatron(models["qwen2-tied"], out, FAST)
    replace = Options(overwrite=True, durable=False)
    hf_to_megatron(models["qwen2-tied"], out, replace)
    assert open_megatron(out).arch.family == "qwen2"
    with pytest.raises(CheckpointError, match="holds the checkpoint that is to be converted"):
        megatron_to_hf(out, out, replace)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="is not a model folder"):
        hf_to_megatron(models["qwen3"], mine, replace)
    assert (mine / "thesis.txt").read_text() == "precious"


def test_header_of_written_safetensors_is_aligned(tmp_path: Path, models: dict[str, Path]) -> None:
    out = megatron_to_hf(hf_to_megatron(models["llama"], tmp_path / "megatron", FAST), tmp_path / "out", FAST)
    with (out / "model.safetensors").open("rb") as file:
        assert struct.unpack("<Q", file.read(8))[0] % 8 == 0
