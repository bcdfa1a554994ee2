"""Which modules a transformer layer is built from: Transformer Engine's on CUDA, Megatron's own elsewhere."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from checkpoint_convert.architecture import ModelArchitecture
from dapo_megatron.platform.base import LayerSpecFamily

_ATTENTION_NORMS = ("q_layernorm", "k_layernorm", "kv_layernorm")


def layer_spec(
    arch: ModelArchitecture, family: LayerSpecFamily, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of one chunk's block: its layers, dense or with experts, and the final norm.

    The parameter names that result are those of `checkpoint_convert.mapping.build_mapping(arch, family)`.
    """
    if family == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        norm: Any = TENorm
    else:
        from dapo_megatron.actor.local_layers import RMSNorm

        norm = RMSNorm
    specs = {is_moe: _layer(family, config, is_moe) for is_moe in (set(arch.moe.moe_layers) if arch.moe else {False})}
    layers = _layers_of_chunk(config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[specs[arch.moe.moe_layers[layer] if arch.moe else False] for layer in layers], layer_norm=norm
    )


def _layers_of_chunk(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Global numbers, from 0, of the layers that this rank builds for a virtual stage."""
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage))
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _layer(family: LayerSpecFamily, config: TransformerConfig, is_moe: bool) -> Any:
    settings: dict[str, Any] = {
        "num_experts": config.num_moe_experts if is_moe else None,
        "moe_grouped_gemm": config.moe_grouped_gemm and is_moe,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if family == "te":
        return get_gpt_layer_with_transformer_engine_spec(**settings)

    from dapo_megatron.actor.local_layers import PackedAttention, RMSNorm
    from dapo_megatron.platform.replicated_linear import ReplicatedLinear

    layer = get_gpt_layer_local_spec(**settings, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
    for name in _ATTENTION_NORMS:
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, RMSNorm)
    return layer
