"""The clipped policy-gradient loss of one token: decoupled clip range (DAPO eq. 8) and dual clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Log-ratios are clamped before exp, so that a mismatch cannot overflow: exp(20) = 4.9e8 is finite and far outside
# every clip range. A token beyond the limit has no gradient.
LOG_RATIO_LIMIT = 20.0


@dataclass(slots=True)
class PolicyLossOutput:
    """Losses of the tokens of one micro-batch.

    Attributes:
        token_loss: `[N]`, to be minimised; exactly 0, with gradient exactly 0, where masked.
        metrics: detached float64 scalars, all sums over unmasked tokens, so that they add up over micro-batches and
            ranks. Divide by `tokens`:
            `tokens` count; `pg_clipfrac` tokens whose ratio was clipped (the clip changed the loss);
            `pg_clipfrac_lower` tokens cut by the dual clip; `ppo_kl` sum of old - new log-prob (k1 estimate);
            `ratio` sum of ratios; `pg_loss` sum of token losses.
    """

    token_loss: Tensor
    metrics: dict[str, Tensor]


def decoupled_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
    is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Loss per response token, `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, r = exp(logprob - old_logprob).

    With `clip_c`, tokens of negative advantage are bounded: `min(loss, -A clip_c)` (dual clip, arXiv 1912.09729; not in the
    DAPO paper, but c = 10 in its scripts). With `is_weights` the loss is multiplied by them; no gradient flows through.

    Masked positions may hold anything, NaN and infinities included: they are replaced by 0 *before* exp, because the
    gradient of `0 * exp(inf)` is NaN even where the loss is not. Unmasked NaN is not hidden: it reaches the loss.

    Args:
        logprobs: `[N]` log-probs of the tokens under the policy being trained, at the sampling temperature; carries the gradient.
        old_logprobs: `[N]` the same under the proximal policy (the actor before this step's updates).
        advantages: `[N]` advantage of each token's response.
        mask: `[N]` bool, true where a token is trained.
        clip_low, clip_high: eps_low, eps_high.
        clip_c: dual-clip bound c > 1, or None.
        is_weights: `[N]` importance weights, or None for 1.

    Raises:
        ValueError: shapes differ, or a bound is out of range.
    """
    if not 0 <= clip_low < 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must be in [0, 1) and clip_high={clip_high} at least 0")
    if clip_c is not None and clip_c <= 1:
        raise ValueError(f"clip_c={clip_c} must be above 1, or None to switch the dual clip off")
    named = {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    if is_weights is not None:
        named["is_weights"] = is_weights
    for name, tensor in named.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}")

    keep = mask.bool()
    zero = logprobs.new_zeros(())
    advantage = torch.where(keep, advantages.detach().to(logprobs.dtype), zero)
    log_ratio = torch.where(keep, logprobs - old_logprobs.detach().to(logprobs.dtype), zero)
    # where() stops the gradient of the subtraction at masked positions: a NaN there cannot leak backwards.
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    cut = torch.zeros_like(keep)
    if clip_c is not None:
        bound = -advantage * clip_c
        cut = keep & (advantage < 0) & (loss > bound)
        loss = torch.where(cut, bound, loss)
    if is_weights is not None:
        loss = loss * torch.where(keep, is_weights.detach().to(logprobs.dtype), zero)
    loss = torch.where(keep, loss, zero)

    with torch.no_grad():
        metrics = {
            "tokens": keep.sum().double(),
            "pg_clipfrac": (keep & (clipped > unclipped)).sum().double(),
            "pg_clipfrac_lower": cut.sum().double(),
            "ppo_kl": -log_ratio.double().sum(),
            "ratio": torch.where(keep, ratio, zero).double().sum(),
            "pg_loss": loss.double().sum(),
        }
    return PolicyLossOutput(token_loss=loss, metrics=metrics)
