"""Advantage estimators: how much better a response is than what its group, or the batch, makes one expect.

Every estimator has the same signature and sees the rewards of the whole step at once, so that batch statistics are
those of the global batch on every rank:

    estimator(rewards, group_ids, *, eps, std) -> advantages

`rewards` float64 `[n]`, `group_ids` int64 `[n]` (equal for the samples of one prompt, in any order), `eps` added to a standard deviation,
`std` its estimator; the result has the shape and dtype of `rewards`. It must not depend on anything else: each rank computes it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

StdEstimator = Literal["sample", "population"]

# Rewards of equal scores may differ by rounding, and dividing that noise by a standard deviation of the same size
# would turn it into advantages of order one. A spread below this, relative to max(1, |reward|), counts as none.
CONSTANT_SPREAD = 1e-6


class AdvantageEstimator(Protocol):
    """See the module's description."""

    def __call__(self, rewards: Tensor, group_ids: Tensor, *, eps: float, std: StdEstimator) -> Tensor: ...


def grpo(rewards: Tensor, group_ids: Tensor, *, eps: float, std: StdEstimator) -> Tensor:
    """`(R - mean of the group) / (std of the group + eps)` (DAPO eq. 9). 0 in groups of one and in constant groups."""
    return _by_group(rewards, group_ids, lambda group: group_advantages(group, eps, std))


def dr_grpo(rewards: Tensor, group_ids: Tensor, *, eps: float, std: StdEstimator) -> Tensor:
    """`R - mean of the group` (arXiv 2503.20783). 0 in groups of one and in constant groups; `eps` and `std` do not matter."""
    return _by_group(rewards, group_ids, _centred)


def rloo(rewards: Tensor, group_ids: Tensor, *, eps: float, std: StdEstimator) -> Tensor:
    """`R - mean of the others in the group` = n / (n - 1) (R - mean) (arXiv 2402.14740).

    A group of one has no others, hence no baseline: 0, like constant groups. `eps` and `std` do not matter.
    """
    return _by_group(rewards, group_ids, lambda group: _centred(group) * (len(group) / max(1, len(group) - 1)))


def reinforce_plus_plus(rewards: Tensor, group_ids: Tensor, *, eps: float, std: StdEstimator) -> Tensor:
    """`(R - mean) / (std + eps)` with mean and std of the whole batch (arXiv 2501.03262).

    Groups do not matter: a group of one or a constant group gets what its rewards are worth in the batch. 0 everywhere
    when the batch is constant or a single sample.
    """
    return group_advantages(rewards, eps, std)


def group_advantages(rewards: Tensor | Sequence[Tensor], eps: float = 1e-6, std: StdEstimator = "sample") -> Tensor:
    """Normalise rewards within each group: `(R - mean) / (std + eps)`.

    The statistics are computed in float64, so the result does not depend on the order of the samples.

    Args:
        rewards: shaped rewards of one group `[G]`, of several groups of equal size `[P, G]`, or a sequence of groups `[G_p]`.
        eps: added to the standard deviation.
        std: `sample` divides the squares by n - 1, `population` by n.

    Returns:
        Advantages in the rewards' dtype and shape (for a sequence: concatenated, `[sum G_p]`); float32 for integer
        rewards. All zero for a group of one sample or of equal rewards.

    Raises:
        ValueError: a reward is NaN or infinite, or a group has the wrong number of dimensions.
    """
    if not isinstance(rewards, Tensor):
        if not rewards:
            return torch.zeros(0)
        for index, group in enumerate(rewards):
            if group.dim() != 1:
                raise ValueError(
                    f"group {index} has shape {tuple(group.shape)}; rewards of a group are one-dimensional"
                )
        return torch.cat([group_advantages(group, eps, std) for group in rewards])
    if rewards.dim() not in (1, 2):
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}; expected [G], [P, G] or a sequence of [G]")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    r = rewards.double()
    _require_finite(r)
    if r.shape[-1] == 1:
        return torch.zeros_like(rewards, dtype=dtype)
    spread = r.std(dim=-1, keepdim=True, unbiased=std == "sample")
    normalised = (r - r.mean(dim=-1, keepdim=True)) / (spread + eps)
    return torch.where(_is_constant(r), torch.zeros_like(r), normalised).to(dtype)


def estimate_advantages(
    estimator: AdvantageEstimator, rewards: Sequence[Tensor], *, eps: float, std: StdEstimator
) -> Tensor:
    """Advantages of the groups of a step, in float32.

    Args:
        rewards: shaped rewards of each group, `[G_p]`; the groups may differ in size.

    Returns:
        float32 `[sum G_p]`, group after group.

    Raises:
        ValueError: a reward or an advantage is not finite, or the estimator returned another shape.
    """
    if not rewards:
        return torch.zeros(0)
    flat = torch.cat([group.double() for group in rewards])
    _require_finite(flat)
    group_ids = torch.repeat_interleave(torch.arange(len(rewards)), torch.tensor([len(group) for group in rewards]))
    advantages = estimator(flat, group_ids, eps=eps, std=std)
    if not isinstance(advantages, Tensor) or advantages.shape != flat.shape:
        shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
        raise ValueError(f"the advantage estimator returned {shape} for rewards of shape {tuple(flat.shape)}")
    advantages = advantages.detach().float()
    if not bool(torch.isfinite(advantages).all()):
        where = torch.nonzero(~torch.isfinite(advantages)).flatten().tolist()
        raise ValueError(f"the advantage estimator returned a value that is not finite for sample {where}")
    return advantages


def _by_group(rewards: Tensor, group_ids: Tensor, of_group: Callable[[Tensor], Tensor]) -> Tensor:
    advantages = torch.zeros_like(rewards)
    for group in torch.unique(group_ids).tolist():
        rows = torch.nonzero(group_ids == group).flatten()
        advantages[rows] = of_group(rewards[rows])
    return advantages


def _centred(group: Tensor) -> Tensor:
    return torch.where(_is_constant(group), torch.zeros_like(group), group - group.mean(dim=-1, keepdim=True))


def _is_constant(rewards: Tensor) -> Tensor:
    spread = rewards.amax(dim=-1, keepdim=True) - rewards.amin(dim=-1, keepdim=True)
    return spread <= CONSTANT_SPREAD * rewards.abs().amax(dim=-1, keepdim=True).clamp(min=1.0)


def _require_finite(rewards: Tensor) -> None:
    if not bool(torch.isfinite(rewards).all()):
        where = torch.nonzero(~torch.isfinite(rewards)).flatten().tolist()
        raise ValueError(f"reward at {where} is not finite; a sample without a score must not reach the advantage")
