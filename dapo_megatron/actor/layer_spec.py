"""Which modules a transformer layer is built from: Transformer Engine's on CUDA, Megatron's own elsewhere."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from checkpoint_convert.architecture import ModelArchitecture
from dapo_megatron.platform.base import LayerSpecFamily


def layer_spec(
    arch: ModelArchitecture, family: LayerSpecFamily, config: TransformerConfig, vp_stage: int | None = None
) -> Any:
    """Return the spec of this pipeline stage's block: its layers and the final norm.

    The parameter names that result are those of `checkpoint_convert.mapping.build_mapping(arch, family)`.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if family == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
        norm: Any = TENorm
    else:
        from dapo_megatron.actor.local_layers import PackedAttention, RMSNorm

        layer = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
        norm = RMSNorm
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)
