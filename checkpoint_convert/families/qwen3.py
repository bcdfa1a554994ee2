"""Qwen3, dense. HF: `modeling_qwen3.py`. Queries and keys are normalised per head; there is no bias."""

from __future__ import annotations

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT, QK_NORM
from checkpoint_convert.families.table import Family

QWEN3 = Family(
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *QK_NORM, *GATED_MLP, *OUTPUT),
    qkv_bias=False,
    qk_norm=True,
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,  # independent of hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    # The switch puts a bias on the output projection too, which the table does not have.
    required={"hidden_act": "silu", "attention_bias": False},
    sliding_window=True,
)
