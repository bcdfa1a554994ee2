"""The mapping of whole models: names, completeness, and HF -> shards -> HF bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_convert.architecture import padded_vocab_size, read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.hf import HFReader
from checkpoint_convert.loading import check_checkpoint, load_shard
from checkpoint_convert.mapping import build_mapping, global_name, hf_shapes, layer_of
from tests.unit.checkpoint_convert.conftest import VARIANTS

ModelFolder = Callable[[str], Path]

LOCAL_LAYER = {
    "input_layernorm.weight": (48,),
    "pre_mlp_layernorm.weight": (48,),
    "self_attention.linear_qkv.weight": ((4 + 2 * 2) * 16, 48),
    "self_attention.linear_proj.weight": (48, 64),
    "self_attention.q_layernorm.weight": (16,),
    "self_attention.k_layernorm.weight": (16,),
    "mlp.linear_fc1.weight": (224, 48),
    "mlp.linear_fc2.weight": (48, 112),
}


def test_names_and_shapes_are_those_of_megatrons_local_spec(model_folder: ModelFolder) -> None:
    mapping = build_mapping(read_architecture(model_folder("qwen3-tied")), "local")
    want = {"embedding.word_embeddings.weight": (79, 48)}
    for layer in range(2):
        want |= {f"decoder.layers.{layer}.{name}": shape for name, shape in LOCAL_LAYER.items()}
    want |= {"decoder.final_layernorm.weight": (48,), "output_layer.weight": (79, 48)}
    assert {name: entry.shard_shape(1) for name, entry in mapping.items()} == want
    assert list(mapping)[0] == "embedding.word_embeddings.weight"
    assert list(mapping)[-1] == "output_layer.weight"


def test_transformer_engine_names_the_norms_after_the_linear_layer(model_folder: ModelFolder) -> None:
    arch = read_architecture(model_folder("qwen2"))
    local, te = build_mapping(arch, "local"), build_mapping(arch, "te")
    assert set(local) - set(te) == {
        f"decoder.layers.{i}.{name}.weight" for i in range(2) for name in ("input_layernorm", "pre_mlp_layernorm")
    }
    assert set(te) - set(local) == {
        f"decoder.layers.{i}.{name}.layer_norm_weight"
        for i in range(2)
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
    }
    assert te["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"].hf == (
        "model.layers.1.post_attention_layernorm.weight",
    )
    assert "decoder.layers.1.self_attention.linear_qkv.bias" in te
    assert hf_shapes(local) == hf_shapes(te)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_that_transformers_wrote_is_mapped(model_folder: ModelFolder, variant: str) -> None:
    folder = model_folder(variant)
    with HFReader(folder) as reader:
        shapes = hf_shapes(build_mapping(read_architecture(folder), "local"))
        assert {name: reader.shape(name) for name in reader.names} == shapes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_hf_to_shards_to_hf_is_bit_for_bit(model_folder: ModelFolder, variant: str, tp: int) -> None:
    folder = model_folder(variant)
    mapping = build_mapping(read_architecture(folder), "local")
    seen = {}
    with HFReader(folder) as reader:
        check_checkpoint(reader, mapping)
        for name, entry in mapping.items():
            shards = [load_shard(reader, mapping, name, rank, tp, etp_rank=rank, etp_size=tp) for rank in range(tp)]
            assert {tuple(shard.shape) for shard in shards} == {entry.shard_shape(tp)}
            for hf_name, tensor in entry.merge(shards):
                assert torch.equal(tensor, reader.tensor(hf_name)), hf_name
                if not entry.tied_copy:
                    seen[hf_name] = tensor
        assert set(seen) == set(reader.names)


@pytest.mark.parametrize("tp", [2, 4])
def test_the_vocabulary_is_padded_to_a_multiple_of_tp(model_folder: ModelFolder, tp: int) -> None:
    folder = model_folder("llama")
    mapping = build_mapping(read_architecture(folder), "local")
    with HFReader(folder) as reader:
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            last = load_shard(reader, mapping, name, tp - 1, tp)
            assert last.shape == (padded_vocab_size(79, tp) // tp, 48)
            assert (last[-1] == 0).all()
            assert (last[-2] != 0).any()


def test_the_output_layer_of_a_tied_model_is_a_copy_of_the_embedding(model_folder: ModelFolder) -> None:
    tied = build_mapping(read_architecture(model_folder("llama-tied")), "local")["output_layer.weight"]
    assert tied.tied_copy
    assert tied.hf == ("model.embed_tokens.weight",)
    untied = build_mapping(read_architecture(model_folder("llama")), "local")["output_layer.weight"]
    assert not untied.tied_copy
    assert untied.hf == ("lm_head.weight",)


def test_stage_names_become_global_names() -> None:
    assert global_name("module.module.decoder.layers.1.mlp.linear_fc2.weight", 6) == (
        "decoder.layers.7.mlp.linear_fc2.weight"
    )
    assert global_name("decoder.final_layernorm.weight", 6) == "decoder.final_layernorm.weight"
    assert layer_of("decoder.layers.12.input_layernorm.weight") == 12
    assert layer_of("output_layer.weight") is None


def test_wrong_shapes_and_impossible_splits_name_the_tensor(model_folder: ModelFolder) -> None:
    mapping = build_mapping(read_architecture(model_folder("llama")), "local")
    entry = mapping["decoder.layers.1.mlp.linear_fc2.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight has shape \(112, 48\), expected"):
        entry.split([torch.zeros(112, 48)], 0, 1)
    with pytest.raises(CheckpointError, match=r"linear_fc2\.weight .*size 112 cannot be split over 3"):
        entry.split([torch.zeros(48, 112)], 0, 3)
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 has shape \(48, 55\), expected \(48, 56\)"):
        entry.merge([torch.zeros(48, 56), torch.zeros(48, 55)])
