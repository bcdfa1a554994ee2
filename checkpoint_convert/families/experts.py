"""Parameters of routed and shared experts, and DeepSeek-V3's way of routing, which several families use.

Megatron's local spec keeps experts apart (`SequentialMLP`), Transformer Engine's in one module with a weight each
(`TEGroupedMLP`, `moe_grouped_gemm`). Both split an expert over the expert tensor parallel group like a dense MLP. Shared
experts are split over the tensor parallel group.
"""

from __future__ import annotations

from checkpoint_convert.config_fields import Fields
from checkpoint_convert.families.table import HFTensor, Param
from checkpoint_convert.parts import MixtureOfExperts

# How many layers for multi-token prediction follow the model's own; both names occur. They are neither trained nor exported.
PREDICTION_LAYER_FIELDS = frozenset({"num_nextn_predict_layers", "num_mtp_layers"})


def routed_experts(block: str, gate: str, up: str, down: str) -> tuple[Param, ...]:
    """Router and experts of a layer.

    Args:
        block: HF name of the module below `model.layers.{layer}`.
        gate, up, down: HF names of an expert's projections.
    """
    prefix = "model.layers.{layer}." + block
    local = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
    grouped = "decoder.layers.{layer}.mlp.experts."
    return (
        Param(
            "decoder.layers.{layer}.mlp.router.weight",
            "copy",
            (HFTensor(f"{prefix}.gate.weight", ("experts", "hidden")),),
            when=("experts",),
        ),
        Param(
            local + "linear_fc1.weight",
            "gated_mlp",
            (
                HFTensor(f"{prefix}.experts.{{expert}}.{gate}.weight", ("expert_ffn", "hidden")),
                HFTensor(f"{prefix}.experts.{{expert}}.{up}.weight", ("expert_ffn", "hidden")),
            ),
            when=("experts",),
            te=grouped + "linear_fc1.weight{expert}",
        ),
        Param(
            local + "linear_fc2.weight",
            "row",
            (HFTensor(f"{prefix}.experts.{{expert}}.{down}.weight", ("hidden", "expert_ffn")),),
            when=("experts",),
            te=grouped + "linear_fc2.weight{expert}",
        ),
    )


ROUTED_EXPERTS = routed_experts("mlp", "gate_proj", "up_proj", "down_proj")

EXPERT_BIAS = (
    Param(
        "decoder.layers.{layer}.mlp.router.expert_bias",
        "copy",
        (HFTensor("model.layers.{layer}.mlp.gate.e_score_correction_bias", ("experts",)),),
        when=("experts",),
        buffer=True,
    ),
)

SHARED_EXPERTS = (
    Param(
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc1.weight",
        "gated_mlp",
        (
            HFTensor("model.layers.{layer}.mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
            HFTensor("model.layers.{layer}.mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        when=("experts",),
    ),
    Param(
        "decoder.layers.{layer}.mlp.shared_experts.linear_fc2.weight",
        "row",
        (HFTensor("model.layers.{layer}.mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),),
        when=("experts",),
    ),
)


def softmax_experts(
    fields: Fields, num_experts: str, ffn: str, moe_layers: tuple[bool, ...], renormalize: bool
) -> MixtureOfExperts:
    """Experts weighted by a softmax over all of them; `num_experts` and `ffn` are names of config fields."""
    experts, top_k = _choice(fields, num_experts)
    if renormalize and top_k == 1:
        # Megatron's TransformerConfig refuses it: the one weight would be 1 and the router would have no gradient.
        raise fields.refuse("num_experts_per_tok=1 with renormalised weights makes every weight 1")
    return MixtureOfExperts(
        num_experts=experts,
        top_k=top_k,
        expert_ffn_hidden_size=fields.integer(ffn),
        shared_ffn_hidden_size=None,
        moe_layers=moe_layers,
        score_function="softmax",
        renormalize=renormalize,
        num_groups=None,
        group_top_k=None,
        scaling_factor=1.0,
        expert_bias=False,
    )


def sigmoid_experts(fields: Fields) -> MixtureOfExperts:
    """DeepSeek-V3's experts (HF `DeepseekV3TopkRouter`, `Glm4MoeTopkRouter`): sigmoid scores, a bias for the choice,
    groups, shared experts, dense first layers.

    Raises:
        CheckpointError: a combination that Megatron's router does not compute.
    """
    experts, top_k = _choice(fields, "n_routed_experts")
    layers, dense = fields.integer("num_hidden_layers"), fields.count("first_k_dense_replace")
    renormalize = fields.boolean("norm_topk_prob")
    if renormalize != (top_k > 1):
        # Megatron divides by the sum of the chosen sigmoids exactly when there are several.
        raise fields.refuse(
            f"norm_topk_prob={str(renormalize).lower()} with num_experts_per_tok={top_k}: Megatron normalises sigmoid weights "
            "if and only if a token goes to more than one expert"
        )
    groups, group_top_k = fields.integer("n_group"), fields.integer("topk_group")
    if experts % groups or group_top_k > groups:
        raise fields.refuse(f"n_routed_experts={experts} in n_group={groups} groups, topk_group={group_top_k}")
    limited = group_top_k < groups
    if limited and top_k // group_top_k != 2:
        # HF adds up the best two of a group, whatever the numbers.
        raise fields.refuse(
            f"num_experts_per_tok={top_k} with topk_group={group_top_k}: a group is scored by its best two experts, in Megatron by its best "
            f"{top_k // group_top_k}"
        )
    if group_top_k * (experts // groups) < top_k or (limited and experts // groups < 2):
        raise fields.refuse(
            f"num_experts_per_tok={top_k}, but {group_top_k} groups have {group_top_k * (experts // groups)} experts"
        )
    return MixtureOfExperts(
        num_experts=experts,
        top_k=top_k,
        expert_ffn_hidden_size=fields.integer("moe_intermediate_size"),
        shared_ffn_hidden_size=fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts"),
        moe_layers=tuple(layer >= dense for layer in range(layers)),
        score_function="sigmoid",
        renormalize=renormalize,
        num_groups=groups if limited else None,
        group_top_k=group_top_k if limited else None,
        scaling_factor=fields.number("routed_scaling_factor"),
        expert_bias=True,
    )


def _choice(fields: Fields, num_experts: str) -> tuple[int, int]:
    experts, top_k = fields.integer(num_experts), fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise fields.refuse(f"num_experts_per_tok={top_k}, but {num_experts}={experts}")
    return experts, top_k
