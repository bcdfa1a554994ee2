"""Gemma, the first generation. HF: `modeling_gemma.py`. Norms scale by 1 + weight, embeddings by the root of hidden_size."""

from __future__ import annotations

import math

from checkpoint_convert.families.dense import ATTENTION, EMBEDDING, GATED_MLP, NORMS, OUTPUT
from checkpoint_convert.families.table import Family

GEMMA = Family(
    model_type="gemma",
    hf_class="GemmaForCausalLM",
    params=(*EMBEDDING, *NORMS, *ATTENTION, *GATED_MLP, *OUTPUT),
    qkv_bias=False,
    qk_norm=False,
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    required={
        # The first folders say "gelu" and mean the approximation; HF reads it so.
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        # Inference engines take the embedding for the output layer without looking.
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
    },
    activation="gelu_tanh",
    norm_offset=True,
    embedding_scale=math.sqrt,
)
