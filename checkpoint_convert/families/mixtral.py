"""Mixtral. HF: `modeling_mixtral.py`. Every layer has routed experts; the chosen weights always sum to 1."""

from __future__ import annotations

from checkpoint_convert.config_fields import Fields
from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, NORMS, OUTPUT
from checkpoint_convert.families.experts import routed_experts, softmax_experts
from checkpoint_convert.families.table import Family
from checkpoint_convert.parts import MixtureOfExperts


def _experts(fields: Fields) -> MixtureOfExperts:
    moe_layers = (True,) * fields.integer("num_hidden_layers")
    return softmax_experts(fields, "num_local_experts", "intermediate_size", moe_layers, renormalize=True)


MIXTRAL = Family(
    model_type="mixtral",
    hf_class="MixtralForCausalLM",
    params=(
        *EMBEDDING,
        *NORMS,
        *ATTENTION,
        *routed_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *OUTPUT,
    ),
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "sliding_window": None,
    },
    required={"hidden_act": "silu", "sliding_window": None},
    aliases={"num_experts": "num_local_experts"},
    rope_theta=1e6,
    moe=_experts,
)
