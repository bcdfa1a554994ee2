"""Importance correction for the gap between the engines' policy (behaviour) and the actor's (proximal).

The engines sampled with slightly older weights and other kernels. With the decoupled objective (AReaL, arXiv 2505.24298) the clip
acts on new / proximal, and what remains, proximal / behaviour, is a weight on the loss, truncated at C so that its variance is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dapo_megatron.algorithm.policy_loss import LOG_RATIO_LIMIT


@dataclass(slots=True)
class CorrectionOutput:
    """Weights of the tokens of one micro-batch.

    Attributes:
        weights: `[N]` float, detached; 0 where masked, 1 everywhere else when the level is `off`.
        metrics: detached float64 scalars over unmasked tokens. Sums, to be added over micro-batches and ranks and divided by `tokens`:
            `tokens` count; `logprob_abs_diff` sum of |old - behaviour|; `k3_kl` sum of exp(x) - 1 - x with x = old - behaviour,
            an estimate of KL(behaviour || old); `is_weight` and `is_weight_sq` sums of w and w^2
            (effective sample size = is_weight^2 / (tokens * is_weight_sq)); `is_capped` tokens whose weight was cut.
            `logprob_abs_diff_max` is a maximum: reduce it by max.
    """

    weights: Tensor
    metrics: dict[str, Tensor]


def importance_weights(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    level: Literal["token", "sequence", "off"],
    cap: float,
) -> CorrectionOutput:
    """Truncated importance weights `min(exp(old - behaviour), cap)`.

    Args:
        old_logprobs: `[N]` the actor's log-probs before this step's updates, at the sampling temperature.
        behaviour_logprobs: `[N]` the engine's log-probs of the same tokens.
        mask: `[N]` bool, true where a token is trained; elsewhere the inputs may hold anything.
        segment_ids: `[N]` non-negative integers, equal within a response. A response must not be split over two calls.
        level: `token`: one weight per token; `sequence`: the product over the response, given to each of its tokens;
            `off`: weight 1, metrics still computed.
        cap: upper bound C.

    Raises:
        ValueError: shapes differ, unknown level, or cap not above 0.
    """
    if level not in ("token", "sequence", "off"):
        raise ValueError(f"unknown off-policy level {level!r}; one of token, sequence, off")
    if not cap > 0:
        raise ValueError(f"cap={cap} must be above 0")
    for name, tensor in {"behaviour_logprobs": behaviour_logprobs, "mask": mask, "segment_ids": segment_ids}.items():
        if tensor.shape != old_logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, old_logprobs {tuple(old_logprobs.shape)}")

    with torch.no_grad():
        keep = mask.bool()
        zero = torch.zeros((), dtype=torch.float64, device=old_logprobs.device)
        # float64: a sequence sum over 20k tokens must not depend on their order, and k3 cancels near 0.
        diff = torch.where(keep, old_logprobs.double() - behaviour_logprobs.double(), zero)
        log_weight = diff
        if level == "sequence":
            segment = torch.where(keep, segment_ids.long(), torch.zeros_like(segment_ids, dtype=torch.int64))
            count = int(segment.max()) + 1 if segment.numel() else 0
            log_weight = zero.expand(count).clone().index_add_(0, segment, diff)[segment] if count else diff
        elif level == "off":
            log_weight = torch.zeros_like(diff)
        untruncated = torch.exp(log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        truncated = untruncated if level == "off" else untruncated.clamp(max=cap)
        weights = torch.where(keep, truncated, zero)
        bounded = diff.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        abs_diff = diff.abs()
        metrics = {
            "tokens": keep.sum().double(),
            "logprob_abs_diff": abs_diff.sum(),
            "logprob_abs_diff_max": abs_diff.max() if abs_diff.numel() else zero.clone(),
            "k3_kl": (torch.expm1(bounded) - bounded).sum(),
            "is_weight": weights.sum(),
            "is_weight_sq": weights.square().sum(),
            "is_capped": (keep & (untruncated > truncated)).sum().double(),
        }
    dtype = old_logprobs.dtype if old_logprobs.is_floating_point() else torch.float32
    return CorrectionOutput(weights=weights.to(dtype), metrics=metrics)
