"""The whole loss of a micro-batch: policy loss with importance weights, KL to the reference, entropy bonus.

    loss = sum_t w_t (policy_t + kl.coef * KL_t - entropy_coef * H_t)

w_t are the global aggregation weights, so the losses of all micro-batches and replicas add up to the mini-batch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.algorithm.correction import importance_weights
from dapo_megatron.algorithm.kl import kl_penalty
from dapo_megatron.algorithm.policy_loss import LOG_RATIO_LIMIT
from dapo_megatron.algorithm.registry import policy_loss_function
from dapo_megatron.config.algorithm_section import AlgorithmSection

# Sums that every policy loss reports, by the loss itself or here.
STANDARD_METRICS = (
    "tokens",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "ratio",
    "log_ratio_clamped",
    "pg_loss",
)
# What a third-party loss reports under other names is kept apart by this prefix.
EXTRA_PREFIX = "policy_loss/"


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss needs of the N response tokens of one micro-batch; whole responses only, N may be 0.

    Attributes:
        logprobs, entropy: `[N]` under the policy being trained, at the sampling temperature; both carry gradients.
        behaviour_logprobs: `[N]` of the engines.
        old_logprobs: `[N]` of the actor before this step's updates; None in `bypass` mode.
        ref_logprobs: `[N]` of the reference; None without a KL term.
        advantages: `[N]`.
        weights: float64 `[N]`, aggregation weight of each token; 0 where masked.
        mask: bool `[N]`, true where a token is trained.
        sequence_ids: `[N]` non-negative integers, equal within a response.
    """

    logprobs: Tensor
    entropy: Tensor
    behaviour_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    sequence_ids: Tensor


class Objective:
    """The loss that an `algorithm` block describes."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._policy_loss = policy_loss_function(algorithm.policy_loss)

    def __call__(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the micro-batch (float64 scalar with gradient) and metrics, detached float64 scalars.

        Metrics are sums (`*_max`: maxima): those of the policy loss and of the correction over unmasked tokens; `loss`, the value returned, and its
        parts `policy_part`, `kl_part` (before its coefficient); `entropy`, sum over unmasked tokens; with a KL term `ref_kl` and
        `ref_kl_clamped`; what a third-party loss adds begins with `policy_loss/`.

        Raises:
            ValueError: log-probs that the settings need are missing, or shapes differ.
        """
        algorithm, off_policy = self._algorithm, self._algorithm.off_policy
        bypass = off_policy.mode == "bypass"
        old = batch.behaviour_logprobs if bypass else batch.old_logprobs
        if old is None:
            raise ValueError("off_policy.mode=decoupled needs old_logprobs")
        correction = importance_weights(
            old,
            batch.behaviour_logprobs,
            batch.mask,
            batch.sequence_ids,
            "off" if bypass else off_policy.level,
            off_policy.cap,
            None if bypass else off_policy.mask_band,
            None if bypass else off_policy.geometric_band,
        )
        policy = self._policy_loss(
            logprobs=batch.logprobs,
            old_logprobs=old,
            advantages=batch.advantages,
            mask=batch.mask,
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            clip_c=algorithm.clip_ratio_c,
            is_weights=correction.weights,
            sequence_ids=batch.sequence_ids,
        )
        total = (policy.token_loss.double() * batch.weights).sum()
        metrics = _policy_metrics(batch, old, policy.token_loss, policy.metrics) | correction.metrics
        metrics["policy_part"] = total.detach()
        if algorithm.kl.coef > 0:
            if batch.ref_logprobs is None:
                raise ValueError(f"algorithm.kl.coef={algorithm.kl.coef} needs ref_logprobs")
            kl, kl_metrics = kl_penalty(batch.logprobs, batch.ref_logprobs, batch.mask, algorithm.kl.kind)
            kl_part = (kl.double() * batch.weights).sum()
            total = total + algorithm.kl.coef * kl_part
            metrics |= kl_metrics | {"kl_part": kl_part.detach()}
        entropy = torch.where(batch.mask, batch.entropy, batch.entropy.new_zeros(()))
        if algorithm.entropy_coef > 0:
            total = total - algorithm.entropy_coef * (entropy.double() * batch.weights).sum()
        metrics["entropy"] = entropy.detach().double().sum()
        metrics["loss"] = total.detach()
        return total, metrics


@torch.no_grad()
def _policy_metrics(
    batch: TokenBatch, old: Tensor, token_loss: Tensor, reported: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The standard sums, computed here as far as a third-party loss does not report them, and its own under a prefix."""
    metrics = {name: value for name, value in reported.items() if name in STANDARD_METRICS}
    metrics |= {f"{EXTRA_PREFIX}{name}": value for name, value in reported.items() if name not in STANDARD_METRICS}
    if all(name in metrics for name in STANDARD_METRICS):
        return metrics
    keep = batch.mask
    zero = torch.zeros((), dtype=torch.float64, device=keep.device)
    log_ratio = torch.where(keep, batch.logprobs.double() - old.double(), zero)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return {
        "tokens": keep.sum().double(),
        "pg_clipfrac": zero,
        "pg_clipfrac_lower": zero,
        "ppo_kl": -log_ratio.sum(),
        "ratio": torch.where(keep, ratio, zero).sum(),
        "log_ratio_clamped": (log_ratio.abs() > LOG_RATIO_LIMIT).sum().double(),
        "pg_loss": token_loss.double().sum(),
    } | metrics
