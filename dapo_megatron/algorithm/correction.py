"""Importance correction for the gap between the engines' policy (behaviour) and the actor's (proximal).

The engines sampled with slightly older weights and other kernels. With the decoupled objective (AReaL, arXiv 2505.24298) the clip
acts on new / proximal, and what remains, proximal / behaviour, is a weight on the loss. Its variance must be bounded: the weight is
truncated at C, or tokens (responses) whose weight is outside a band are taken out; and responses whose typical token
ratio is far from 1 may be rejected as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dapo_megatron.algorithm.policy_loss import LOG_RATIO_LIMIT, sequence_sums


@dataclass(slots=True)
class CorrectionOutput:
    """Weights of the tokens of one micro-batch.

    Attributes:
        weights: `[N]` float, detached; 0 where masked or rejected, otherwise 1 when the level is `off`.
        metrics: detached float64 scalars over unmasked tokens. Sums, to be added over micro-batches and ranks and divided by `tokens`:
            `tokens` count; `logprob_abs_diff` sum of |x| with x = old - behaviour; `k1_kl` sum of -x and `k3_kl` sum of
            exp(x) - 1 - x, estimates of KL(behaviour || old); `is_weight` and `is_weight_sq` sums of w and w^2
            (effective sample size = is_weight^2 / (tokens * is_weight_sq)); `is_capped` tokens whose weight was cut to the
            cap; `is_masked` tokens whose weight was outside the band; `seq_rejected_tokens` tokens of rejected responses.
            To be divided by `sequences`, the number of responses with an unmasked token: `seq_rejected`.
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
    band: tuple[float, float] | None = None,
    geometric_band: tuple[float | None, float | None] | None = None,
) -> CorrectionOutput:
    """Importance weights `w = exp(old - behaviour)`, truncated to `min(w, cap)` or, with a band, masked: `w` inside, else 0.

    A token that is masked by its weight keeps its place in the denominators of the loss (the weights are not known
    when those are fixed): taking tokens out makes the update smaller, not the others larger.

    Args:
        old_logprobs: `[N]` the actor's log-probs before this step's updates, at the sampling temperature.
        behaviour_logprobs: `[N]` the engine's log-probs of the same tokens.
        mask: `[N]` bool, true where a token is trained; elsewhere the inputs may hold anything.
        segment_ids: `[N]` non-negative integers, equal within a response. A response must not be split over two calls.
        level: `token`: one weight per token; `sequence`: the product over the response, given to each of its tokens;
            `off`: weight 1, metrics still computed.
        cap: upper bound C; not used with a band.
        band: keep weights in [low, high], ends included (masked importance sampling, IcePop).
        geometric_band: reject responses whose `exp(mean_t (old - behaviour))` is outside [low, high]; None leaves an end open.

    Raises:
        ValueError: shapes differ, unknown level, cap not above 0, or an empty band.
    """
    if level not in ("token", "sequence", "off"):
        raise ValueError(f"unknown off-policy level {level!r}; one of token, sequence, off")
    if not cap > 0:
        raise ValueError(f"cap={cap} must be above 0")
    if band is not None and (level == "off" or not 0 <= band[0] < band[1]):
        raise ValueError(f"band={band} needs 0 <= low < high and the level token or sequence, not {level}")
    for name, tensor in {"behaviour_logprobs": behaviour_logprobs, "mask": mask, "segment_ids": segment_ids}.items():
        if tensor.shape != old_logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, old_logprobs {tuple(old_logprobs.shape)}")

    with torch.no_grad():
        keep = mask.bool()
        zero = torch.zeros((), dtype=torch.float64, device=old_logprobs.device)
        # float64: a sequence sum over 20k tokens must not depend on their order, and k3 cancels near 0.
        diff = torch.where(keep, old_logprobs.double() - behaviour_logprobs.double(), zero)
        sums, lengths = sequence_sums(diff, keep, segment_ids)
        log_weight = {"token": diff, "sequence": sums, "off": torch.zeros_like(diff)}[level]
        raw = torch.exp(log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        nowhere = torch.zeros_like(keep)
        capped = masked = nowhere
        if band is not None:
            masked = keep & ((raw < band[0]) | (raw > band[1]))
            bounded_weight = torch.where(masked, zero, raw)
        elif level != "off":
            capped = keep & (raw > cap)
            bounded_weight = raw.clamp(max=cap)
        else:
            bounded_weight = raw
        rejected = keep & _outside(sums / lengths.clamp(min=1), geometric_band)
        weights = torch.where(keep & ~rejected, bounded_weight, zero)
        bounded = diff.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        abs_diff = diff.abs()
        # Each token counts for 1 / n of its response, so that the sum counts responses.
        share = torch.where(keep, 1.0 / lengths.clamp(min=1), zero)
        metrics = {
            "tokens": keep.sum().double(),
            "logprob_abs_diff": abs_diff.sum(),
            "logprob_abs_diff_max": abs_diff.max() if abs_diff.numel() else zero.clone(),
            "k1_kl": -diff.sum(),
            "k3_kl": (torch.expm1(bounded) - bounded).sum(),
            "is_weight": weights.sum(),
            "is_weight_sq": weights.square().sum(),
            "is_capped": capped.sum().double(),
            "is_masked": masked.sum().double(),
            "sequences": share.sum(),
            "seq_rejected": torch.where(rejected, share, zero).sum(),
            "seq_rejected_tokens": rejected.sum().double(),
        }
    dtype = old_logprobs.dtype if old_logprobs.is_floating_point() else torch.float32
    return CorrectionOutput(weights=weights.to(dtype), metrics=metrics)


def _outside(log_ratio: Tensor, band: tuple[float | None, float | None] | None) -> Tensor:
    low, high = band or (None, None)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside |= ratio < low
    if high is not None:
        outside |= ratio > high
    return outside
