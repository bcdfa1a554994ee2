"""Qwen2 and Qwen2.5, dense. HF: `modeling_qwen2.py`. Query, key and value always have a bias, the output projection never."""

from __future__ import annotations

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT, QKV_BIAS
from checkpoint_convert.families.table import Family

QWEN2 = Family(
    model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *QKV_BIAS, *GATED_MLP, *OUTPUT),
    qkv_bias=True,
    qk_norm=False,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,  # hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    required={"hidden_act": "silu"},
    sliding_window=True,
)
