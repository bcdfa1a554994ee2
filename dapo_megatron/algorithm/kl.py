"""Estimators of KL(policy || reference) per token, used as a loss term (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from dapo_megatron.algorithm.policy_loss import LOG_RATIO_LIMIT

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

# `low_var_kl` is k3 within these bounds, as common trainers have it: one token cannot dominate the loss.
LOW_VAR_LIMIT = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: KLKind) -> tuple[Tensor, dict[str, Tensor]]:
    """KL of each token, with d = logprob - ref_logprob.

    - `k1`: d. Unbiased, may be negative; its gradient as a loss term has mean 0 on the policy's own samples.
    - `k2`: d^2 / 2. Biased, but its gradient is the gradient of the KL.
    - `k3`: exp(-d) - 1 + d, d limited to +-20. Unbiased and never negative.
    - `low_var_kl`: k3 limited to [-10, 10]; no gradient beyond.

    Args:
        logprobs: `[N]` under the policy, carries the gradient. ref_logprobs: `[N]` under the reference, same temperature.
        mask: `[N]` bool; elsewhere the inputs may hold anything and value and gradient are exactly 0.

    Returns:
        `[N]` values in the dtype of `logprobs`, and detached float64 sums: `ref_kl` of the values, `ref_kl_clamped`
        tokens that met a limit.

    Raises:
        ValueError: shapes differ or the kind is unknown.
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"unknown kind of KL {kind!r}; one of {', '.join(get_args(KLKind))}")
    for name, tensor in {"ref_logprobs": ref_logprobs, "mask": mask}.items():
        if tensor.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}")
    keep = mask.bool()
    zero = logprobs.new_zeros(())
    d = torch.where(keep, logprobs - ref_logprobs.detach().to(logprobs.dtype), zero)
    clamped = torch.zeros_like(keep)
    if kind == "k1":
        value = d
    elif kind == "k2":
        value = 0.5 * d.square()
    else:
        bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        clamped = keep & (d.detach().abs() > LOG_RATIO_LIMIT)
        # expm1: near d = 0 the terms cancel to d^2 / 2.
        value = torch.expm1(-bounded) + bounded
        if kind == "low_var_kl":
            clamped = clamped | (keep & (value.detach() > LOW_VAR_LIMIT))
            value = value.clamp(-LOW_VAR_LIMIT, LOW_VAR_LIMIT)
    value = torch.where(keep, value, zero)
    with torch.no_grad():
        metrics = {"ref_kl": value.double().sum(), "ref_kl_clamped": clamped.sum().double()}
    return value, metrics
