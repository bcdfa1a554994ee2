"""Qwen3 with routed experts. HF: `modeling_qwen3_moe.py`. Attention as in Qwen3; some layers may keep a dense MLP."""

from __future__ import annotations

from checkpoint_convert.config_fields import Fields
from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT, QK_NORM
from checkpoint_convert.families.experts import ROUTED_EXPERTS, softmax_experts
from checkpoint_convert.families.table import Family
from checkpoint_convert.parts import MixtureOfExperts


def _experts(fields: Fields) -> MixtureOfExperts:
    dense, step = fields.indices("mlp_only_layers"), fields.integer("decoder_sparse_step")
    layers = range(fields.integer("num_hidden_layers"))
    moe_layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)
    return softmax_experts(
        fields, "num_experts", "moe_intermediate_size", moe_layers, renormalize=fields.boolean("norm_topk_prob")
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *QK_NORM, *GATED_MLP, *ROUTED_EXPERTS, *OUTPUT),
    qkv_bias=False,
    qk_norm=True,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": None,  # hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "num_experts_per_tok": 8,
    },
    reads=("num_experts", "moe_intermediate_size", "sliding_window", "max_window_layers"),
    # `attention_bias` puts a bias on the output projection too, which the table does not have; the HF class gives the
    # window, where it is in use, to all layers.
    required={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    aliases={"num_local_experts": "num_experts"},
    moe=_experts,
)
