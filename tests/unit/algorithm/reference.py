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
