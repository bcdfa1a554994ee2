"""Routed experts: names in both layer specs, placement over expert-parallel ranks, and their loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint_convert.architecture import read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.hf import HFReader
from checkpoint_convert.loading import load_parameters
from checkpoint_convert.mapping import LayerSpec, ParamMapping, build_mapping, expert_of, global_name, layer_of

ModelFolder = Callable[[str], Path]
SPARSE = ("deepseek_v3", "deepseek_v3-direct", "glm4_moe", "glm4_moe-plain", "mixtral-tied", "qwen3_moe")


def local_name(entry: ParamMapping, first_layer: int, first_expert: int) -> str:
    """The name that the parameter has on a rank: its layers and experts counted from 0."""
    name, layer = entry.megatron, layer_of(entry.megatron)
    if entry.expert is not None:
        for before, after in (("local_experts.", "."), ("linear_fc1.weight", ""), ("linear_fc2.weight", "")):
            name = name.replace(f"{before}{entry.expert}{after}", f"{before}{entry.expert - first_expert}{after}")
    return name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer - first_layer}.", 1)


def empty_rank(
    mapping: dict[str, ParamMapping], tp: int, ep: int, etp: int, ep_rank: int, num_experts: int, first_layer: int = 0
) -> dict[str, Tensor]:
    """Parameters and buffers of one rank as Megatron names them, filled with NaN; layers from `first_layer` on."""
    mine = range(ep_rank * (num_experts // ep), (ep_rank + 1) * (num_experts // ep))
    parameters = {}
    for entry in mapping.values():
        layer = layer_of(entry.megatron)
        if (layer is not None and layer < first_layer) or (entry.expert is not None and entry.expert not in mine):
            continue
        shape = entry.shard_shape(tp if entry.expert is None else etp)
        parameters[local_name(entry, first_layer, mine.start)] = torch.full(shape, float("nan"))
    return parameters


def test_names_of_experts_in_both_specs(model_folder: ModelFolder) -> None:
    arch = read_architecture(model_folder("qwen3_moe"))
    assert arch.moe is not None and arch.moe.moe_layers == (True, False, True)
    local, te = build_mapping(arch, "local"), build_mapping(arch, "te")
    in_layer = {
        spec: {
            name.removeprefix("decoder.layers.2.mlp."): entry.shard_shape(1)
            for name, entry in mapping.items()
            if name.startswith("decoder.layers.2.mlp.")
        }
        for spec, mapping in (("local", local), ("te", te))
    }
    assert in_layer["local"] == {"router.weight": (8, 48)} | {
        f"experts.local_experts.{e}.{name}.weight": shape
        for e in range(8)
        for name, shape in (("linear_fc1", (80, 48)), ("linear_fc2", (48, 40)))
    }
    assert in_layer["te"] == {"router.weight": (8, 48)} | {
        f"experts.{name}.weight{e}": shape
        for e in range(8)
        for name, shape in (("linear_fc1", (80, 48)), ("linear_fc2", (48, 40)))
    }
    # Transformer Engine fuses the norm with a dense MLP, not with experts.
    assert {name for name in te if "pre_mlp" in name or "fc1.layer_norm" in name} == {
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.pre_mlp_layernorm.weight",
    }
    entry = te["decoder.layers.2.mlp.experts.linear_fc1.weight5"]
    assert (entry.expert, entry.buffer) == (5, False)
    assert entry.hf == tuple(f"model.layers.2.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up"))


def test_names_of_latent_attention_in_both_specs(model_folder: ModelFolder) -> None:
    arch = read_architecture(model_folder("deepseek_v3"))
    shapes = {
        spec: {
            name.removeprefix("decoder.layers.0."): entry.shard_shape(4)
            for name, entry in build_mapping(arch, spec).items()
            if name.startswith("decoder.layers.0.") and "mlp" not in name
        }
        for spec in ("local", "te")
    }
    shared = {
        "input_layernorm.weight": (48,),
        "self_attention.linear_q_up_proj.weight": (20, 24),
        "self_attention.linear_kv_up_proj.weight": (28, 20),
        "self_attention.linear_proj.weight": (48, 16),
    }
    assert shapes["local"] == shared | {
        "self_attention.linear_q_down_proj.weight": (24, 48),
        "self_attention.q_layernorm.weight": (24,),
        "self_attention.linear_kv_down_proj.weight": (28, 48),
        "self_attention.kv_layernorm.weight": (20,),
    }
    assert shapes["te"] == shared | {
        "self_attention.linear_q_down_proj.weight": (24, 48),
        "self_attention.linear_q_up_proj.layer_norm_weight": (24,),
        "self_attention.linear_kv_down_proj.weight": (28, 48),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (20,),
    }
    direct = build_mapping(read_architecture(model_folder("deepseek_v3-direct")), "te")
    assert direct["decoder.layers.0.self_attention.linear_q_proj.weight"].shard_shape(4) == (20, 48)
    assert not any("q_up_proj" in name or "q_down_proj" in name for name in direct)


def test_the_selection_bias_is_a_buffer(model_folder: ModelFolder) -> None:
    mapping = build_mapping(read_architecture(model_folder("glm4_moe")), "local")
    buffers = {name: entry.hf for name, entry in mapping.items() if entry.buffer}
    assert buffers == {
        f"decoder.layers.{i}.mlp.router.expert_bias": (f"model.layers.{i}.mlp.gate.e_score_correction_bias",)
        for i in (1, 2)
    }


def test_local_expert_numbers_become_global() -> None:
    assert global_name("decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight", 6, 12) == (
        "decoder.layers.7.mlp.experts.local_experts.13.linear_fc2.weight"
    )
    assert global_name("module.decoder.layers.0.mlp.experts.linear_fc1.weight3", 2, 8) == (
        "decoder.layers.2.mlp.experts.linear_fc1.weight11"
    )
    for name in ("mlp.shared_experts.linear_fc1.weight", "mlp.router.expert_bias", "mlp.linear_fc1.weight"):
        assert global_name(f"decoder.layers.0.{name}", 0, 8) == f"decoder.layers.0.{name}"
        assert expert_of(f"decoder.layers.0.{name}") is None
    assert expert_of("decoder.layers.2.mlp.experts.linear_fc1.weight11") == 11


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (2, 2, 1), (1, 4, 2), (4, 1, 4), (2, 4, 4), (4, 2, 2)])
@pytest.mark.parametrize("variant", SPARSE)
def test_every_placement_gives_every_tensor_back(
    model_folder: ModelFolder, variant: str, spec: LayerSpec, tp: int, ep: int, etp: int
) -> None:
    """Load each rank of a layout in place, then merge what the ranks hold."""
    folder = model_folder(variant)
    arch = read_architecture(folder)
    assert arch.moe is not None
    num_experts = arch.moe.num_experts
    mapping = build_mapping(arch, spec)
    shards: dict[str, dict[int, Tensor]] = {}
    with HFReader(folder) as reader:
        for ep_rank in range(ep):
            for rank in range(max(tp, etp)):
                parameters = empty_rank(mapping, tp, ep, etp, ep_rank, num_experts)
                offset = ep_rank * (num_experts // ep)
                load_parameters(
                    parameters,
                    reader,
                    mapping,
                    rank % tp,
                    tp,
                    etp_rank=rank % etp,
                    etp_size=etp,
                    expert_offset=offset,
                )
                for name, tensor in parameters.items():
                    key = global_name(name, 0, offset)
                    slot = rank % tp if mapping[key].expert is None else rank % etp
                    seen = shards.setdefault(key, {}).setdefault(slot, tensor)
                    assert torch.equal(seen, tensor)
        merged = {}
        for name, entry in mapping.items():
            parts = [shards[name][slot] for slot in range(tp if entry.expert is None else etp)]
            merged |= dict(entry.merge(parts))
        assert set(merged) == set(reader.names)
        for name in reader.names:
            assert torch.equal(merged[name], reader.tensor(name)), name


def test_a_rank_of_a_stage_is_filled_with_its_own_experts(model_folder: ModelFolder) -> None:
    folder = model_folder("deepseek_v3")
    mapping = build_mapping(read_architecture(folder), "te")
    stage = empty_rank(mapping, 1, 4, 1, 3, 8, first_layer=2)
    with HFReader(folder) as reader:
        load_parameters(stage, reader, mapping, 0, 1, layer_offset=2, expert_offset=6)
        prefix = "model.layers.2.mlp.experts"
        down = stage["decoder.layers.0.mlp.experts.linear_fc2.weight1"]
        assert torch.equal(down, reader.tensor(f"{prefix}.7.down_proj.weight"))
        fused = stage["decoder.layers.0.mlp.experts.linear_fc1.weight0"]
        halves = [reader.tensor(f"{prefix}.6.{name}_proj.weight") for name in ("gate", "up")]
        assert torch.equal(fused, torch.cat(halves))
        bias = stage["decoder.layers.0.mlp.router.expert_bias"]
        assert bias.shape == (8,) and torch.equal(
            bias, reader.tensor("model.layers.2.mlp.gate.e_score_correction_bias")
        )
    assert not any(tensor.isnan().any() for tensor in stage.values())


def test_missing_and_misplaced_experts_are_named(model_folder: ModelFolder) -> None:
    folder = model_folder("deepseek_v3")
    mapping = build_mapping(read_architecture(folder), "te")
    rank = empty_rank(mapping, 1, 4, 1, 1, 8)

    def load(parameters: dict[str, Tensor], **placement: int) -> None:
        with HFReader(folder) as reader:
            load_parameters(parameters, reader, mapping, 0, 1, **placement)

    without_one = {
        name: tensor for name, tensor in rank.items() if "layers.1.mlp.experts.linear_fc2.weight0" not in name
    }
    with pytest.raises(CheckpointError, match=r"no parameter decoder\.layers\.1\.mlp\.experts\.linear_fc2\.weight2,"):
        load(without_one, expert_offset=2)
    without_any = {name: tensor for name, tensor in rank.items() if ".experts." not in name}
    with pytest.raises(CheckpointError, match=r"no parameter .*experts\.linear_fc1\.weight2 \(and 3 more\)"):
        load(without_any, expert_offset=2)
    without_bias = {name: tensor for name, tensor in rank.items() if "expert_bias" not in name}
    with pytest.raises(CheckpointError, match=r"router\.expert_bias \(and 1 more\)"):
        load(without_bias, expert_offset=2)
    with pytest.raises(CheckpointError, match=r"experts\.linear_fc1\.weight8 is made of no HF tensor"):
        load(rank, expert_offset=7)
    with pytest.raises(CheckpointError, match=r"for expert tensor-parallel rank 1 of 2"):
        load(rank, expert_offset=2, etp_rank=1, etp_size=2)
    with pytest.raises(CheckpointError, match=r"size 40 cannot be split over 3"):
        load(rank, expert_offset=2, etp_size=3)
