"""GLM-4-9B (`glm-4-9b-chat-hf`). HF: `modeling_glm.py`. Neighbouring features of the first half of a head are rotated."""

from __future__ import annotations

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, FUSED_GATED_MLP, NORMS, OUTPUT, QKV_BIAS
from checkpoint_convert.families.table import Family

GLM = Family(
    model_type="glm",
    hf_class="GlmForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *FUSED_GATED_MLP, *OUTPUT),
    qkv_bias="attention_bias",
    qk_norm=False,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    required={"hidden_act": "silu"},
    rotary_fraction=0.5,
    rotary_interleaved=True,
    rope_types=("default",),
)
