"""Policy losses of single tokens: decoupled and dual clip (DAPO eq. 8), GSPO, CISPO and the plain policy gradient.

Every loss has the same signature:

    loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, clip_c, is_weights=None, sequence_ids=None)

Tensors are `[N]`, one entry per response token of a micro-batch; whole responses only, N = 0 included.

- `logprobs`: log-probs under the policy being trained, at the sampling temperature; carries the gradient.
- `old_logprobs`: the same under the proximal policy (the actor before this step's updates; the engines in `bypass`).
- `advantages`: advantage of each token's response.
- `mask`: bool, true where a token is trained. Masked positions may hold anything, NaN and infinities included: they are
  replaced by 0 *before* exp, because the gradient of `0 * exp(inf)` is NaN even where the loss is not. Loss and
  gradient are exactly 0 there. Unmasked NaN is not hidden: it reaches the loss.
- `clip_low`, `clip_high`, `clip_c`: eps_low, eps_high and the dual-clip bound c > 1 (None: off).
- `is_weights`: importance weights that multiply the loss, without gradient; None for 1.
- `sequence_ids`: non-negative integers, equal within a response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# Log-ratios are clamped before exp, so that a mismatch cannot overflow: exp(20) = 4.9e8 is finite and far outside
# every clip range. A token beyond the limit has no gradient through its ratio.
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
            `ratio` sum of the ratios that the loss used; `log_ratio_clamped` tokens beyond the limit of +-20;
            `pg_loss` sum of token losses. A third-party loss may leave any of them out and add names of its own.
    """

    token_loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """See the module's description."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        clip_low: float,
        clip_high: float,
        clip_c: float | None,
        is_weights: Tensor | None = None,
        sequence_ids: Tensor | None = None,
    ) -> PolicyLossOutput: ...


def decoupled_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
    is_weights: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> PolicyLossOutput:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, r = exp(logprob - old_logprob).

    With `clip_c`, tokens of negative advantage are bounded: `min(loss, -A clip_c)` (dual clip, arXiv 1912.09729; not in the
    DAPO paper, but c = 10 in its scripts).

    Raises:
        ValueError: shapes differ, or a bound is out of range.
    """
    tokens = _Tokens.of(logprobs, old_logprobs, advantages, mask, is_weights, sequence_ids)
    _check_bounds(clip_low, clip_high, clip_c)
    ratio = _bounded_exp(tokens.log_ratio)
    return _clipped(tokens, ratio, tokens.log_ratio, clip_low, clip_high, clip_c)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
    is_weights: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> PolicyLossOutput:
    """The clipped loss with the ratio of the whole response, `s = exp(mean_t (logprob - old_logprob))` (GSPO, arXiv 2507.18071).

    The mean is over the unmasked tokens of the response, so clipping takes whole responses. The gradient is that of
    GSPO-token: each token has the ratio `sg(s) exp(logprob - sg(logprob))`, whose value is s and whose gradient with
    respect to its own log-prob is s. With equal advantages in a response and `seq-mean-token-mean` this is GSPO's gradient.

    Raises:
        ValueError: shapes differ, a bound is out of range, or no `sequence_ids`.
    """
    tokens = _Tokens.of(logprobs, old_logprobs, advantages, mask, is_weights, sequence_ids)
    _check_bounds(clip_low, clip_high, clip_c)
    if sequence_ids is None:
        raise ValueError("the gspo loss needs sequence_ids")
    with torch.no_grad():
        # float64: the mean over 20k tokens must not depend on their order.
        log_s = sequence_means(tokens.log_ratio.double(), tokens.keep, sequence_ids)
        inside = log_s.abs() <= LOG_RATIO_LIMIT
        s = _bounded_exp(log_s).to(logprobs.dtype)
    own = torch.where(inside, tokens.log_ratio - tokens.log_ratio.detach(), tokens.zero)
    return _clipped(tokens, s * torch.exp(own), log_s, clip_low, clip_high, clip_c)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
    is_weights: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> PolicyLossOutput:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob` (CISPO, MiniMax-M1, arXiv 2506.13585).

    The clipped ratio is a weight, so every token keeps a gradient. `clip_low = 1` leaves the ratio unbounded below,
    as in the paper. `clip_c` does not matter.

    Raises:
        ValueError: shapes differ, or a bound is out of range.
    """
    tokens = _Tokens.of(logprobs, old_logprobs, advantages, mask, is_weights, sequence_ids)
    _check_bounds(clip_low, clip_high, None)
    with torch.no_grad():
        ratio = _bounded_exp(tokens.log_ratio)
        weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = tokens.weigh(-weight * tokens.advantage * tokens.logprob)
    return PolicyLossOutput(loss, tokens.metrics(loss, ratio, tokens.log_ratio, clipped=weight != ratio))


def pg_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
    is_weights: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> PolicyLossOutput:
    """`-A logprob`, the policy gradient without ratio or clip; the bounds do not matter. The ratio is only reported.

    Raises:
        ValueError: shapes differ.
    """
    tokens = _Tokens.of(logprobs, old_logprobs, advantages, mask, is_weights, sequence_ids)
    loss = tokens.weigh(-tokens.advantage * tokens.logprob)
    return PolicyLossOutput(loss, tokens.metrics(loss, _bounded_exp(tokens.log_ratio), tokens.log_ratio))


def sequence_means(values: Tensor, keep: Tensor, sequence_ids: Tensor) -> Tensor:
    """`[N]`: for each token the mean of `values` over the kept tokens of its response; 0 where not kept.

    Args:
        values: `[N]`, anything finite where `keep` is true.
        keep: `[N]` bool.
        sequence_ids: `[N]` non-negative integers, equal within a response.
    """
    sums, counts = sequence_sums(values, keep, sequence_ids)
    return torch.where(keep, sums / counts.clamp(min=1), torch.zeros_like(sums))


def sequence_sums(values: Tensor, keep: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Like `sequence_means`: sum over the kept tokens of each token's response, and their number."""
    ids = torch.where(keep, sequence_ids.long(), torch.zeros_like(sequence_ids, dtype=torch.int64))
    size = int(ids.max()) + 1 if ids.numel() else 0
    kept = torch.where(keep, values, torch.zeros_like(values))
    sums = values.new_zeros(size).index_add_(0, ids, kept)[ids]
    counts = values.new_zeros(size).index_add_(0, ids, keep.to(values.dtype))[ids]
    return torch.where(keep, sums, torch.zeros_like(sums)), torch.where(keep, counts, torch.zeros_like(counts))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Checked inputs, 0 where masked; `where` stops the gradient there, so a masked NaN cannot leak backwards."""

    logprob: Tensor
    log_ratio: Tensor
    advantage: Tensor
    keep: Tensor
    is_weight: Tensor | None
    zero: Tensor

    @staticmethod
    def of(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        is_weights: Tensor | None,
        sequence_ids: Tensor | None,
    ) -> _Tokens:
        named = {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
        named |= {"is_weights": is_weights} if is_weights is not None else {}
        named |= {"sequence_ids": sequence_ids} if sequence_ids is not None else {}
        for name, tensor in named.items():
            if tensor.shape != logprobs.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}")
        keep, zero, dtype = mask.bool(), logprobs.new_zeros(()), logprobs.dtype
        return _Tokens(
            logprob=torch.where(keep, logprobs, zero),
            log_ratio=torch.where(keep, logprobs - old_logprobs.detach().to(dtype), zero),
            advantage=torch.where(keep, advantages.detach().to(dtype), zero),
            keep=keep,
            is_weight=None if is_weights is None else torch.where(keep, is_weights.detach().to(dtype), zero),
            zero=zero,
        )

    def weigh(self, loss: Tensor) -> Tensor:
        if self.is_weight is not None:
            loss = loss * self.is_weight
        return torch.where(self.keep, loss, self.zero)

    @torch.no_grad()
    def metrics(
        self,
        loss: Tensor,
        ratio: Tensor,
        log_used: Tensor,
        clipped: Tensor | None = None,
        cut: Tensor | None = None,
    ) -> dict[str, Tensor]:
        nowhere = torch.zeros_like(self.keep)
        return {
            "tokens": self.keep.sum().double(),
            "pg_clipfrac": (self.keep & (nowhere if clipped is None else clipped)).sum().double(),
            "pg_clipfrac_lower": (self.keep & (nowhere if cut is None else cut)).sum().double(),
            "ppo_kl": -self.log_ratio.double().sum(),
            "ratio": torch.where(self.keep, ratio, self.zero).double().sum(),
            "log_ratio_clamped": (self.keep & (log_used.abs() > LOG_RATIO_LIMIT)).sum().double(),
            "pg_loss": loss.double().sum(),
        }


def _clipped(
    tokens: _Tokens, ratio: Tensor, log_ratio: Tensor, clip_low: float, clip_high: float, clip_c: float | None
) -> PolicyLossOutput:
    """The pessimistic choice between the ratio and the clipped ratio, then the dual clip."""
    advantage = tokens.advantage
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    cut = torch.zeros_like(tokens.keep)
    if clip_c is not None:
        bound = -advantage * clip_c
        cut = tokens.keep & (advantage < 0) & (loss > bound)
        loss = torch.where(cut, bound, loss)
    loss = tokens.weigh(loss)
    return PolicyLossOutput(loss, tokens.metrics(loss, ratio, log_ratio, clipped > unclipped, cut))


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _check_bounds(clip_low: float, clip_high: float, clip_c: float | None) -> None:
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must be in [0, 1] and clip_high={clip_high} at least 0")
    if clip_c is not None and clip_c <= 1:
        raise ValueError(f"clip_c={clip_c} must be above 1, or None to switch the dual clip off")
