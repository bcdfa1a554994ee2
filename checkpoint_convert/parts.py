"""Parts of a decoder that only some families have: latent attention and routed experts. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): keys and values come from a narrow latent.

    Attributes:
        q_lora_rank: width of the query latent; None: queries are projected directly.
        kv_lora_rank: width of the latent that keys and values share.
        qk_nope_head_dim: width of a query or key head without the rotary part.
        qk_rope_head_dim: width of the rotary part; all heads share one rotary key. Pairs of neighbouring features are
            rotated, which Megatron's MLA and HF's `apply_rotary_pos_emb_interleave` do alike.
        v_head_dim: width of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class MixtureOfExperts:
    """Routed experts in some or all layers.

    Attributes:
        num_experts: routed experts of a layer.
        top_k: experts that a token goes to.
        expert_ffn_hidden_size: width of one routed expert.
        shared_ffn_hidden_size: width of all shared experts together; None without.
        moe_layers: per layer, whether it has routed experts (True) or a dense MLP.
        score_function: of the router's logits.
        renormalize: the chosen weights are divided by their sum before `scaling_factor`.
        num_groups, group_top_k: experts are chosen within the best `group_top_k` of `num_groups` groups, a group's score
            being the sum of its best `top_k / group_top_k` (Megatron `group_limited_topk`); None: among all experts.
        scaling_factor: of the chosen weights; 1.0: none.
        expert_bias: a bias per expert is added to the scores for the choice only (HF `e_score_correction_bias`).
            Megatron keeps it as the float32 buffer `router.expert_bias`.
    """

    num_experts: int
    top_k: int
    expert_ffn_hidden_size: int
    shared_ffn_hidden_size: int | None
    moe_layers: tuple[bool, ...]
    score_function: Literal["softmax", "sigmoid"]
    renormalize: bool
    num_groups: int | None
    group_top_k: int | None
    scaling_factor: float
    expert_bias: bool
