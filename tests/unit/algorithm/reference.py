"""DAPO's formulas once more, written independently: float64 NumPy, one token at a time, gradients by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def advantages(rewards: Sequence[float], eps: float) -> np.ndarray:
    r = [float(x) for x in rewards]
    n = len(r)
    if n < 2 or max(r) == min(r):
        return np.zeros(n)
    mean = math.fsum(r) / n
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in r) / (n - 1))
    return np.array([(x - mean) / (std + eps) for x in r])


def token_loss_and_gradient(
    logprob: float, old: float, advantage: float, low: float, high: float, c: float | None, weight: float
) -> tuple[float, float]:
    """Loss of one unmasked token and its derivative with respect to `logprob`."""
    d = logprob - old
    ratio = math.exp(max(-20.0, min(20.0, d)))
    slope = ratio if abs(d) <= 20.0 else 0.0
    plain = ratio * advantage
    clipped = max(1 - low, min(1 + high, ratio)) * advantage
    if plain <= clipped:
        loss, gradient = -plain, -advantage * slope
    else:
        loss, gradient = -clipped, 0.0
    if c is not None and advantage < 0 and loss > -advantage * c:
        loss, gradient = -advantage * c, 0.0
    return weight * loss, weight * gradient


def mini_batch_loss(losses: Sequence[Sequence[float]], groups: Sequence[int], mode: str, max_length: int) -> float:
    """Aggregate the token losses of every sample; samples without tokens do not count."""
    kept = [(list(x), g) for x, g in zip(losses, groups, strict=True) if len(x)]
    if not kept:
        return 0.0
    if mode == "token-mean":
        return math.fsum(x for sample, _ in kept for x in sample) / sum(len(sample) for sample, _ in kept)
    if mode == "group-token-mean":
        means = []
        for group in {g for _, g in kept}:
            tokens = [x for sample, g in kept if g == group for x in sample]
            means.append(math.fsum(tokens) / len(tokens))
        return math.fsum(means) / len(means)
    if mode == "seq-mean-token-mean":
        return math.fsum(math.fsum(sample) / len(sample) for sample, _ in kept) / len(kept)
    total = math.fsum(math.fsum(sample) for sample, _ in kept) / len(kept)
    return total / max_length if mode == "seq-mean-token-sum-norm" else total


def importance_weight(diffs: Sequence[float], level: str, cap: float) -> list[float]:
    """Weights of the tokens of one response from old - behaviour log-probs."""
    if level == "off":
        return [1.0] * len(diffs)
    if level == "sequence":
        total = math.fsum(diffs)
        diffs = [total] * len(diffs)
    return [min(cap, math.exp(max(-20.0, min(20.0, d)))) for d in diffs]


def estimated_advantages(name: str, groups: Sequence[Sequence[float]], eps: float, ddof: int) -> list[float]:
    """Advantages of each estimator, from its definition."""
    batch = [float(x) for group in groups for x in group]
    out = []
    for group in groups:
        r = [float(x) for x in group]
        n, mean = len(r), math.fsum(r) / len(r)
        constant = max(r) == min(r)
        if name in ("grpo", "dapo"):
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in r) / (n - ddof)) if n > 1 else 0.0
            out += [0.0] * n if constant else [(x - mean) / (std + eps) for x in r]
        elif name == "dr_grpo":
            out += [0.0 if constant else x - mean for x in r]
        elif name == "rloo":
            out += [0.0 if constant else x - (math.fsum(r) - x) / (n - 1) for x in r]
        else:
            mean, n = math.fsum(batch) / len(batch), len(batch)
            constant = max(batch) == min(batch)
            std = 1.0 if constant else math.sqrt(math.fsum((x - mean) ** 2 for x in batch) / (n - ddof))
            out += [0.0 if constant else (x - mean) / (std + eps) for x in r]
    return out


def response_loss_and_gradient(
    name: str,
    logprobs: Sequence[float],
    old: Sequence[float],
    advantages: Sequence[float],
    weights: Sequence[float],
    low: float,
    high: float,
    c: float | None,
) -> tuple[list[float], list[float]]:
    """Losses and derivatives (with respect to the own log-prob) of the unmasked tokens of one response."""
    rows = list(zip(logprobs, old, advantages, weights, strict=True))
    if name == "clip":
        pairs = [token_loss_and_gradient(lp, o, a, low, high, c, w) for lp, o, a, w in rows]
    elif name == "gspo":
        mean = math.fsum(lp - o for lp, o, _, _ in rows) / len(rows) if rows else 0.0
        # Value and slope of the sequence's ratio are those of a token whose log-ratio is the mean.
        pairs = [token_loss_and_gradient(mean, 0.0, a, low, high, c, w) for _, _, a, w in rows]
    elif name == "cispo":
        pairs = []
        for lp, o, a, w in rows:
            ratio = max(1 - low, min(1 + high, math.exp(max(-20.0, min(20.0, lp - o)))))
            pairs.append((-w * ratio * a * lp, -w * ratio * a))
    else:
        pairs = [(-w * a * lp, -w * a) for lp, _, a, w in rows]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def kl_and_gradient(kind: str, logprob: float, ref: float) -> tuple[float, float]:
    d = logprob - ref
    if kind == "k1":
        return d, 1.0
    if kind == "k2":
        return d * d / 2, d
    bounded = max(-20.0, min(20.0, d))
    value = math.expm1(-bounded) + bounded
    gradient = -math.expm1(-bounded) if abs(d) <= 20.0 else 0.0
    if kind == "low_var_kl" and value > 10.0:
        return 10.0, 0.0
    return value, gradient


def correction_weights(
    diffs: Sequence[float],
    level: str,
    cap: float,
    band: tuple[float, float] | None,
    geometric: tuple[float | None, float | None] | None,
) -> list[float]:
    """Weights of the unmasked tokens of one response from old - behaviour log-probs."""
    if not diffs:
        return []
    low, high = geometric or (None, None)
    typical = math.exp(max(-20.0, min(20.0, math.fsum(diffs) / len(diffs))))
    if (low is not None and typical < low) or (high is not None and typical > high):
        return [0.0] * len(diffs)
    if band is None:
        return importance_weight(diffs, level, cap)
    raw = importance_weight(diffs, level, math.inf)
    return [w if band[0] <= w <= band[1] else 0.0 for w in raw]
