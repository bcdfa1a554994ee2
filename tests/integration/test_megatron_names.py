"""The weight mapping's names and shapes are those of real Megatron models, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks import leave_model_parallel, run_ranks
from tests.toy_models import FAMILIES, make_model

# Variants that have other parameters than the family's toy model.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie": True}),
    "deepseek_v3-direct": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "glm4_moe-plain": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
}


def shapes_of_built_models(folders: dict[str, str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """In one process: parameters and checkpointed buffers of each model, as Megatron names them, with their shapes."""
    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.model import build_model
    from dapo_megatron.actor.process_groups import initialize, shutdown
    from dapo_megatron.platform import current_platform
    from tests.integration.actor_ranks import Layout, make_config

    platform = current_platform()
    found = {}
    for variant, folder in folders.items():
        config = make_config(folder, Layout(), 1, groups=1, group_size=2)
        here = initialize(config.parallel, platform, seed=1)
        (chunk,) = build_model(read_architecture(folder), config, here, platform)
        state = dict(chunk.module.named_parameters())
        # A persistent buffer is one that a checkpoint holds.
        persistent = set(chunk.module.state_dict())
        state |= {name: buffer for name, buffer in chunk.module.named_buffers() if name in persistent}
        found[variant] = {name: tuple(tensor.shape) for name, tensor in state.items()}
        leave_model_parallel()
    shutdown()
    return found


def test_mapping_and_megatron_have_the_same_parameters(tmp_path: Path) -> None:
    from checkpoint_convert.architecture import read_architecture
    from checkpoint_convert.mapping import build_mapping

    variants = {family: (family, {}) for family in FAMILIES} | OTHERS
    folders = {
        name: str(make_model(tmp_path / name, family, **settings)) for name, (family, settings) in variants.items()
    }
    (built,) = run_ranks(1, shapes_of_built_models, folders)
    for variant, folder in folders.items():
        mapping = build_mapping(read_architecture(folder), "local")
        # One stage holds both ends, so a tied model has no second copy.
        want = {name: entry.shard_shape(1) for name, entry in mapping.items() if not entry.tied_copy}
        if len(want) != len(mapping):
            assert "output_layer.weight" not in built[variant]
        assert built[variant] == want, variant


def test_latent_attention_rotates_as_transformers_does(tmp_path: Path) -> None:
    assert run_ranks(1, rotations_of_latent_attention, str(tmp_path)) == [[]]


def rotations_of_latent_attention(folder: str) -> list[str]:
    """In one process: what differs between Megatron's and transformers' rotation and attention scale of latent attention."""
    from dapo_megatron.platform import current_platform

    current_platform()
    return [
        f"{mscales}: {difference}"
        for mscales in ({}, {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0.5})
        for difference in _differences(folder, mscales)
    ]


def _differences(folder: str, mscales: dict[str, float]) -> list[str]:
    import torch
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, _yarn_get_mscale
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    from checkpoint_convert.architecture import read_architecture

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4, **mscales}
    settings = {**FAMILIES["deepseek_v3"][1], "num_attention_heads": 4, "max_position_embeddings": 512}
    config = DeepseekV3Config(**settings, rope_parameters=yarn, architectures=["DeepseekV3ForCausalLM"])
    config.save_pretrained(folder)
    arch = read_architecture(folder)
    assert arch.latent_attention is not None
    scaling = arch.rope_scaling
    assert scaling is not None
    width, positions = arch.latent_attention.qk_rope_head_dim, 300
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, positions, width, generator=generator) for heads in (2, 1))

    cos, sin = hf.DeepseekV3RotaryEmbedding(config)(query, torch.arange(positions)[None])
    want = hf.apply_rotary_pos_emb_interleave(query, key, cos, sin)
    rope = YarnRotaryEmbedding(
        width,
        rotary_base=arch.rope_theta,
        use_cpu_initialization=True,
        scaling_factor=scaling["factor"],
        **{name: scaling[name] for name in scaling.keys() - {"rope_type", "factor"}},
    )
    angles, mscale = rope(positions)
    differences = []
    for name, tensor, expected in (("query", query, want[0]), ("key", key, want[1])):
        by_position = tensor.permute(2, 0, 1, 3)
        rotated = _apply_rotary_pos_emb_bshd(by_position, angles, multi_latent_attention=True, mscale=mscale)
        error = (rotated.permute(1, 2, 0, 3) - expected).abs().max().item()
        if error > 1e-4:
            differences.append(f"{name} by {error}")
    ours = _yarn_get_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    theirs = hf.yarn_apply_mscale(config.rope_parameters, 1.0)
    if abs(ours - theirs) > 1e-7:
        differences.append(f"attention scale {ours} instead of {theirs}")
    return differences
