"""Parameters of multi-head latent attention (Megatron `MLASelfAttention`, HF `DeepseekV3Attention`).

Query and key rows stay as HF has them: both sides rotate neighbouring features of the rotary part and put the pairs' first
and second features into the two halves (`_apply_rotary_pos_emb_bshd` with `multi_latent_attention`).

Every rank has the down projections whole. In Transformer Engine's spec each latent's norm is fused with the up projection that
follows it, the input norm with nothing.
"""

from __future__ import annotations

from checkpoint_convert.config_fields import Fields
from checkpoint_convert.families.table import HFTensor, Param
from checkpoint_convert.parts import LatentAttention

_LAYER = "decoder.layers.{layer}."
_ATTENTION = "decoder.layers.{layer}.self_attention."
_HF = "model.layers.{layer}.self_attn."

LATENT_ATTENTION = (
    Param(
        _LAYER + "input_layernorm.weight",
        "copy",
        (HFTensor("model.layers.{layer}.input_layernorm.weight", ("hidden",)),),
    ),
    Param(
        _ATTENTION + "linear_q_proj.weight",
        "column",
        (HFTensor(_HF + "q_proj.weight", ("latent_query", "hidden")),),
        when=("direct_query",),
    ),
    Param(
        _ATTENTION + "linear_q_down_proj.weight",
        "copy",
        (HFTensor(_HF + "q_a_proj.weight", ("query_latent", "hidden")),),
        when=("query_latent",),
    ),
    Param(
        _ATTENTION + "q_layernorm.weight",
        "copy",
        (HFTensor(_HF + "q_a_layernorm.weight", ("query_latent",)),),
        when=("query_latent",),
        te=_ATTENTION + "linear_q_up_proj.layer_norm_weight",
    ),
    Param(
        _ATTENTION + "linear_q_up_proj.weight",
        "column",
        (HFTensor(_HF + "q_b_proj.weight", ("latent_query", "query_latent")),),
        when=("query_latent",),
    ),
    Param(
        _ATTENTION + "linear_kv_down_proj.weight",
        "copy",
        (HFTensor(_HF + "kv_a_proj_with_mqa.weight", ("kv_latent_and_rope", "hidden")),),
    ),
    Param(
        _ATTENTION + "kv_layernorm.weight",
        "copy",
        (HFTensor(_HF + "kv_a_layernorm.weight", ("kv_latent",)),),
        te=_ATTENTION + "linear_kv_up_proj.layer_norm_weight",
    ),
    Param(
        _ATTENTION + "linear_kv_up_proj.weight",
        "column",
        (HFTensor(_HF + "kv_b_proj.weight", ("latent_key_value", "kv_latent")),),
    ),
    Param(
        _ATTENTION + "linear_proj.weight",
        "row",
        (HFTensor(_HF + "o_proj.weight", ("hidden", "latent_value")),),
    ),
)

# Fields that transformers derives and writes, too.
DERIVED = ("head_dim", "qk_head_dim")


def latent_attention(fields: Fields) -> LatentAttention:
    """Read the widths.

    Raises:
        CheckpointError: a width is missing, or a derived field contradicts the others.
    """
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    for name, value in zip(DERIVED, (rope, nope + rope), strict=True):
        if fields.given(name) and fields.value(name) != value:
            raise fields.refuse(
                f"{name}={fields.value(name)!r}, but qk_nope_head_dim={nope} and qk_rope_head_dim={rope}"
            )
    return LatentAttention(
        q_lora_rank=fields.integer("q_lora_rank") if fields.given("q_lora_rank") else None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=fields.integer("v_head_dim"),
    )
