"""Mistral without a sliding window (7B v0.2 and later). HF: `modeling_mistral.py`. Llama's layout."""

from __future__ import annotations

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT
from checkpoint_convert.families.table import Family

MISTRAL = Family(
    model_type="mistral",
    hf_class="MistralForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *GATED_MLP, *OUTPUT),
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    required={"hidden_act": "silu", "sliding_window": None},
)
