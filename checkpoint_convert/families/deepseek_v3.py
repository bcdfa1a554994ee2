"""DeepSeek-V3 and R1. HF: `modeling_deepseek_v3.py`. Latent attention, dense first layers, shared experts, sigmoid routing.

The layer for multi-token prediction, which the published folders store after the last layer, is ignored, as HF does.
"""

from __future__ import annotations

from checkpoint_convert.families.dense import EMBEDDING, FINAL_NORM, GATED_MLP, MLP_NORMS, OUTPUT
from checkpoint_convert.families.experts import EXPERT_BIAS, ROUTED_EXPERTS, SHARED_EXPERTS, sigmoid_experts
from checkpoint_convert.families.latent import DERIVED, LATENT_ATTENTION, latent_attention
from checkpoint_convert.families.table import Family

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    params=(
        *EMBEDDING,
        *LATENT_ATTENTION,
        *MLP_NORMS,
        *GATED_MLP,
        *ROUTED_EXPERTS,
        *EXPERT_BIAS,
        *SHARED_EXPERTS,
        *FINAL_NORM,
        *OUTPUT,
    ),
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "num_key_value_heads": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    reads=("n_routed_experts", "moe_intermediate_size", "num_nextn_predict_layers", *DERIVED),
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        # The HF class normalises the latents with 1e-6 whatever the field says; Megatron has one number for all norms.
        "rms_norm_eps": 1e-6,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    own_code=(
        "configuration_deepseek.DeepseekV3Config",
        "modeling_deepseek.DeepseekV3Model",
        "modeling_deepseek.DeepseekV3ForCausalLM",
    ),
    rope_types=("default", "yarn"),
    moe=sigmoid_experts,
    latent_attention=latent_attention,
)
