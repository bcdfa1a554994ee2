"""Parameters that the decoder families share: embedding, norms, attention, gated MLP, output layer."""

from __future__ import annotations

from checkpoint_convert.families.table import HFTensor, Param

EMBEDDING = (
    Param("embedding.word_embeddings.weight", "vocab", (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),)),
)

_POST_ATTENTION_NORM = (HFTensor("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),)

# The norm before the MLP: fused with a dense MLP by Transformer Engine, never with routed experts.
MLP_NORMS = (
    Param(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        "copy",
        _POST_ATTENTION_NORM,
        when=("dense_mlp",),
        te="decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
    ),
    Param("decoder.layers.{layer}.pre_mlp_layernorm.weight", "copy", _POST_ATTENTION_NORM, when=("experts",)),
)

FINAL_NORM = (Param("decoder.final_layernorm.weight", "copy", (HFTensor("model.norm.weight", ("hidden",)),)),)

NORMS = (
    Param(
        "decoder.layers.{layer}.input_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.input_layernorm.weight", ("hidden",)),),
        te="decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight",
    ),
    *MLP_NORMS,
    *FINAL_NORM,
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
        when=("qkv_bias",),
    ),
)

QK_NORM = (
    Param(
        "decoder.layers.{layer}.self_attention.q_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.self_attn.q_norm.weight", ("head",)),),
        when=("qk_norm",),
    ),
    Param(
        "decoder.layers.{layer}.self_attention.k_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.self_attn.k_norm.weight", ("head",)),),
        when=("qk_norm",),
    ),
)

_DOWN = Param(
    "decoder.layers.{layer}.mlp.linear_fc2.weight",
    "row",
    (HFTensor("model.layers.{layer}.mlp.down_proj.weight", ("hidden", "ffn")),),
    when=("dense_mlp",),
)

GATED_MLP = (
    Param(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        "gated_mlp",
        (
            HFTensor("model.layers.{layer}.mlp.gate_proj.weight", ("ffn", "hidden")),
            HFTensor("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        when=("dense_mlp",),
    ),
    _DOWN,
)

# Gate and up projection are one HF tensor, the gate first.
FUSED_GATED_MLP = (
    Param(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        "fused_gated_mlp",
        (HFTensor("model.layers.{layer}.mlp.gate_up_proj.weight", ("gate_and_up", "hidden")),),
        when=("dense_mlp",),
    ),
    _DOWN,
)

# A tied model has no output weight of its own, except on a last pipeline stage that is not also the first: there
# GPTModel keeps a copy of the embedding and sums the two gradients (megatron.core ...language_module.py,
# setup_embeddings_and_output_layer).
OUTPUT = (
    Param("output_layer.weight", "vocab", (HFTensor("lm_head.weight", ("vocab", "hidden")),), when=("untied",)),
    Param(
        "output_layer.weight",
        "vocab",
        (HFTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
        when=("tied",),
        tied_copy=True,
    ),
)
