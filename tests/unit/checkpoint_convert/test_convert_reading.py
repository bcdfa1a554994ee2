"""Reading weights from a folder: shards with an index, and one clear error for each way in which files can be broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_convert.architecture import read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.hf import HFReader
from checkpoint_convert.loading import check_checkpoint, load_parameters, load_shard
from checkpoint_convert.mapping import ParamMapping, build_mapping

ModelFolder = Callable[[str], Path]
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def copy(model_folder: ModelFolder, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a model folder that a test may damage."""
    return lambda variant: Path(shutil.copytree(model_folder(variant), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path, files: int = 3) -> None:
    """Split the single file of `folder` into several with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::files]}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[i::files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def mapping_of(folder: Path) -> dict[str, ParamMapping]:
    return build_mapping(read_architecture(folder), "local")


def check(folder: Path) -> None:
    with HFReader(folder) as reader:
        check_checkpoint(reader, mapping_of(folder))


def test_shards_with_an_index_hold_the_same_tensors(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen3-tied")
    want = load_file(folder / "model.safetensors")
    shard(folder)
    check(folder)
    with HFReader(folder) as reader:
        assert set(reader.names) == set(want)
        assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in want.items())


def test_a_truncated_file_names_the_first_tensor_that_is_cut(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        HFReader(folder)
    assert str(path) in str(caught.value)
    assert "truncated: tensor model." in str(caught.value)
    assert "1 of 21 tensors" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 8, 300])
def test_a_file_cut_within_its_header_names_a_tensor_from_the_index(copy: Callable[[str], Path], keep: int) -> None:
    folder = copy("llama")
    shard(folder)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors.*model\.") as caught:
        HFReader(folder)
    assert "\n" not in str(caught.value)


def test_a_file_with_trailing_bytes_or_a_broken_header_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"xx")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt"):
        HFReader(folder)
    path.write_bytes(whole[:20] + b"\xff" + whole[21:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: corrupt header"):
        HFReader(folder)
    path.write_bytes(b"<html><body>Not found</body></html>")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        HFReader(folder)


def test_a_missing_tensor_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.pop(Q))
    with pytest.raises(CheckpointError, match=f"tensor {Q} is missing"):
        check(folder)
    with HFReader(folder) as reader, pytest.raises(CheckpointError, match=f"tensor {Q} is missing"):
        load_shard(reader, mapping_of(folder), "decoder.layers.1.self_attention.linear_qkv.weight", 0, 1)


def test_an_unknown_tensor_is_named_with_its_file(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        check(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_its_file(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q].T.contiguous()}))
    message = rf"model\.safetensors: tensor {Q} has shape \(48, 64\), config.json says \(64, 48\)"
    with pytest.raises(CheckpointError, match=message):
        check(folder)
    with HFReader(folder) as reader, pytest.raises(CheckpointError, match=message):
        load_shard(reader, mapping_of(folder), "decoder.layers.1.self_attention.linear_qkv.weight", 0, 1)


def test_integer_weights_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{Q} has dtype I8"):
        check(folder)
    with HFReader(folder) as reader, pytest.raises(CheckpointError, match=f"{Q} has dtype I8"):
        reader.tensor(Q)


def test_stored_rotary_frequencies_are_ignored(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(8.0)}))
    check(folder)


def test_a_tied_model_may_store_its_output_layer_if_it_equals_the_embedding(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tied")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    check(folder)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        check(folder)


def test_an_untied_model_without_output_layer_gets_a_hint(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.*tie_word_embeddings"):
        check(folder)


def test_an_index_that_disagrees_with_the_files_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    shard(folder)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first = whole["weight_map"][Q]

    moved = next(file for file in whole["weight_map"].values() if file != first)
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], Q: moved}}))
    with pytest.raises(CheckpointError, match=Q):
        HFReader(folder)
    index.write_text(json.dumps({"weight_map": {**whole["weight_map"], Q: "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="no file name"):
        HFReader(folder)
    for broken in ("{", "{}", '{"weight_map": []}'):
        index.write_text(broken)
        with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index"):
            HFReader(folder)
    index.write_text(json.dumps(whole))
    (folder / first).unlink()
    with pytest.raises(CheckpointError, match=f"{first}: missing"):
        HFReader(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        HFReader(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be used"):
        HFReader(tmp_path)


def test_a_layer_for_multi_token_prediction_is_ignored_and_said_so_once(
    copy: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy("deepseek_v3")
    # As in the published folders: a decoder layer after the last, with its own embedding and a projection of both inputs.
    beyond = {
        f"model.layers.3.{name}.weight": torch.zeros(4) for name in ("enorm", "eh_proj", "mlp.gate", "embed_tokens")
    }
    rewrite(folder, lambda tensors: tensors.update(beyond))
    for _ in range(2):
        check(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: layer 3 predicts further tokens (MTP); it is neither trained nor exported"
    ]
    # Any other layer too many stays an error.
    rewrite(folder, lambda tensors: tensors.update({"model.layers.4.mlp.gate.weight": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.4\.mlp\.gate\.weight is not part of this model"):
        check(folder)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_stage_is_filled_in_place_in_its_own_dtype(model_folder: ModelFolder, tp_rank: int) -> None:
    folder = model_folder("qwen2")
    mapping = mapping_of(folder)
    # The last of two stages: layer 1, final norm, output layer, wrapped once.
    prefix = "decoder.layers.1."
    names = [name for name in mapping if name.startswith((prefix, "decoder.final", "output"))]
    stage = {
        "module." + name.replace(prefix, "decoder.layers.0."): torch.nn.Parameter(
            torch.full(mapping[name].shard_shape(2), 9.0, dtype=torch.bfloat16)
        )
        for name in names
    }
    with HFReader(folder) as reader:
        load_parameters(stage, reader, mapping, tp_rank, 2, layer_offset=1)
        for name, parameter in zip(names, stage.values(), strict=True):
            want = load_shard(reader, mapping, name, tp_rank, 2)
            assert want.dtype == torch.float32
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, want.to(torch.bfloat16))


def test_a_model_built_with_other_options_is_refused(model_folder: ModelFolder) -> None:
    folder = model_folder("qwen3-tied")
    mapping = mapping_of(folder)
    stage = {name: torch.zeros(entry.shard_shape(1)) for name, entry in mapping.items()}
    with HFReader(folder) as reader:
        extra = {**stage, "decoder.layers.0.self_attention.linear_qkv.bias": torch.zeros(128)}
        with pytest.raises(CheckpointError, match=r"linear_qkv\.bias is made of no HF tensor"):
            load_parameters(extra, reader, mapping, 0, 1)
        fewer = {name: tensor for name, tensor in stage.items() if "layers.1.self_attention.q_layernorm" not in name}
        with pytest.raises(CheckpointError, match=r"no parameter decoder\.layers\.1\.self_attention\.q_layernorm"):
            load_parameters(fewer, reader, mapping, 0, 1)
        with pytest.raises(CheckpointError, match=r"word_embeddings\.weight has shape \(79, 48\).*rank 0 of 2"):
            load_parameters(stage, reader, mapping, 0, 2)


def test_a_loaded_shard_owns_its_memory(model_folder: ModelFolder) -> None:
    folder = model_folder("llama")
    mapping = mapping_of(folder)
    with HFReader(folder) as reader:
        for name in ("decoder.final_layernorm.weight", "embedding.word_embeddings.weight"):
            first = load_shard(reader, mapping, name, 0, 1)
            before = first.clone()
            first.zero_()
            assert torch.equal(load_shard(reader, mapping, name, 0, 1), before)
