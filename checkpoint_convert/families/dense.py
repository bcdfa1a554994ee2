"""Parameters that the dense decoder families share: embedding, norms, attention, gated MLP, output layer."""

from __future__ import annotations

from checkpoint_convert.families.table import HFTensor, Param

EMBEDDING = (
    Param("embedding.word_embeddings.weight", "vocab", (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),)),
)

NORMS = (
    Param(
        "decoder.layers.{layer}.input_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.input_layernorm.weight", ("hidden",)),),
    ),
    Param(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
    ),
    Param("decoder.final_layernorm.weight", "copy", (HFTensor("model.norm.weight", ("hidden",)),)),
)

ATTENTION = (
    Param(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        "qkv",
        (
            HFTensor("model.layers.{layer}.self_attn.q_proj.weight", ("query", "hidden")),
            HFTensor("model.layers.{layer}.self_attn.k_proj.weight", ("kv", "hidden")),
            HFTensor("model.layers.{layer}.self_attn.v_proj.weight", ("kv", "hidden")),
        ),
    ),
    Param(
        "decoder.layers.{layer}.self_attention.linear_proj.weight",
        "row",
        (HFTensor("model.layers.{layer}.self_attn.o_proj.weight", ("hidden", "query")),),
    ),
)

QKV_BIAS = (
    Param(
        "decoder.layers.{layer}.self_attention.linear_qkv.bias",
        "qkv",
        (
            HFTensor("model.layers.{layer}.self_attn.q_proj.bias", ("query",)),
            HFTensor("model.layers.{layer}.self_attn.k_proj.bias", ("kv",)),
            HFTensor("model.layers.{layer}.self_attn.v_proj.bias", ("kv",)),
        ),
    ),
)

QK_NORM = (
    Param(
        "decoder.layers.{layer}.self_attention.q_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.self_attn.q_norm.weight", ("head",)),),
    ),
    Param(
        "decoder.layers.{layer}.self_attention.k_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.self_attn.k_norm.weight", ("head",)),),
    ),
)

GATED_MLP = (
    Param(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        "gated_mlp",
        (
            HFTensor("model.layers.{layer}.mlp.gate_proj.weight", ("ffn", "hidden")),
            HFTensor("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden")),
        ),
    ),
    Param(
        "decoder.layers.{layer}.mlp.linear_fc2.weight",
        "row",
        (HFTensor("model.layers.{layer}.mlp.down_proj.weight", ("hidden", "ffn")),),
    ),
)

# A tied model has no output weight of its own, except on a last pipeline stage that is not also the first: there
# GPTModel keeps a copy of the embedding and sums the two gradients (megatron.core ...language_module.py,
# setup_embeddings_and_output_layer).
OUTPUT = (
    Param("output_layer.weight", "vocab", (HFTensor("lm_head.weight", ("vocab", "hidden")),), tied=False),
    Param(
        "output_layer.weight",
        "vocab",
        (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        tied=True,
        tied_copy=True,
    ),
)
