"""Llama (2, 3, 3.1, 3.2) and models that use its layout, for example SmolLM2. HF: `modeling_llama.py`."""

from __future__ import annotations

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT
from checkpoint_convert.families.table import Family

LLAMA = Family(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *GATED_MLP, *OUTPUT),
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "num_key_value_heads": None,  # as many as heads
        "head_dim": None,  # hidden_size / heads
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    # Llama's switches put biases on the output projections too, which the table does not have.
    required={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
