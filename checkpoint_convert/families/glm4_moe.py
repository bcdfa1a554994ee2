"""GLM-4.5 and 4.6. HF: `modeling_glm4_moe.py`. Grouped-query attention with half-rotated heads, experts as in DeepSeek-V3.

The layer for multi-token prediction, which the published folders store after the last layer, is ignored, as HF does.
"""

from __future__ import annotations

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT, QK_NORM, QKV_BIAS
from checkpoint_convert.families.experts import EXPERT_BIAS, ROUTED_EXPERTS, SHARED_EXPERTS, sigmoid_experts
from checkpoint_convert.families.table import Family

GLM4_MOE = Family(
    model_type="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    params=(
        *EMBEDDING,
        *NORMS,
        *ATTENTION,
        *QKV_BIAS,
        *QK_NORM,
        *GATED_MLP,
        *ROUTED_EXPERTS,
        *EXPERT_BIAS,
        *SHARED_EXPERTS,
        *OUTPUT,
    ),
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
    },
    reads=("n_routed_experts", "moe_intermediate_size", "num_nextn_predict_layers"),
    required={"hidden_act": "silu"},
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    rotary_fraction=0.5,
    rope_types=("default",),
    moe=sigmoid_experts,
)
