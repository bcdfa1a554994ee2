"""Group-relative advantage (DAPO eq. 9): how much better a response is than its siblings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Rewards of equal scores may differ by rounding, and dividing that noise by a standard deviation of the same size
# would turn it into advantages of order one. A spread below this, relative to max(1, |reward|), counts as none.
CONSTANT_SPREAD = 1e-6


def group_advantages(rewards: Tensor | Sequence[Tensor], eps: float = 1e-6) -> Tensor:
    """Normalise rewards within each group: `(R - mean) / (std + eps)`, with the unbiased std (n - 1).

    The statistics are computed in float64, so the result does not depend on the order of the samples.

    Args:
        rewards: shaped rewards of one group `[G]`, of several groups of equal size `[P, G]`, or a sequence of groups `[G_p]`.
        eps: added to the standard deviation.

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
        return torch.cat([group_advantages(group, eps) for group in rewards])
    if rewards.dim() not in (1, 2):
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}; expected [G], [P, G] or a sequence of [G]")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    r = rewards.double()
    if not bool(torch.isfinite(r).all()):
        where = torch.nonzero(~torch.isfinite(r)).flatten().tolist()
        raise ValueError(f"reward at {where} is not finite; a sample without a score must not reach the advantage")
    if r.shape[-1] == 1:
        return torch.zeros_like(rewards, dtype=dtype)
    spread = r.amax(dim=-1, keepdim=True) - r.amin(dim=-1, keepdim=True)
    constant = spread <= CONSTANT_SPREAD * r.abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
    normalised = (r - r.mean(dim=-1, keepdim=True)) / (r.std(dim=-1, keepdim=True, unbiased=True) + eps)
    return torch.where(constant, torch.zeros_like(r), normalised).to(dtype)
