"""From token losses to one number, with denominators that are global to the mini-batch.

Every aggregation mode is a weighted sum, `loss = sum_i w_i sum_t loss_it`, whose weights depend on response lengths alone. Lengths of *all*
samples of the mini-batch are known to every rank before the first forward pass (they are in the ticket), so each rank weighs
its tokens with the final denominators and the result cannot depend on micro-batches, packing, data-parallel size or order.
The caller adds up micro-batches and ranks, and divides by nothing.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

AggregationMode = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


def token_weights(
    mode: AggregationMode, response_lengths: Tensor, group_ids: Tensor, max_response_length: int
) -> Tensor:
    """Weight of every token of a sample, for each sample of a mini-batch.

    With T = all trained tokens, n = samples with at least one, n_i = tokens of sample i, T_g = tokens of its group and
    K = groups with at least one token:

    - `token-mean`: 1 / T. Every token counts the same (DAPO as commonly run).
    - `group-token-mean`: 1 / (K T_g). A token mean in each prompt group, then the mean over groups (DAPO eq. 8 literally).
    - `seq-mean-token-mean`: 1 / (n n_i). A token mean in each response, then the mean over responses (GRPO).
    - `seq-mean-token-sum`: 1 / n.
    - `seq-mean-token-sum-norm`: 1 / (n max_response_length), a constant divisor (Dr. GRPO, arXiv 2503.20783).

    Args:
        mode: see above.
        response_lengths: `[n]` integers, trained tokens of each sample of the mini-batch, all ranks included; 0 takes a sample out.
        group_ids: `[n]` integers, equal for samples of one prompt; the values have no other meaning.
        max_response_length: the divisor of `seq-mean-token-sum-norm`.

    Returns:
        float64 `[n]`, on the device of the lengths; 0 for samples without tokens.

    Raises:
        ValueError: unknown mode, shapes differ, a negative length.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(f"unknown aggregation mode {mode!r}; one of {', '.join(get_args(AggregationMode))}")
    if response_lengths.dim() != 1 or response_lengths.shape != group_ids.shape:
        raise ValueError(
            f"response_lengths {tuple(response_lengths.shape)} and group_ids {tuple(group_ids.shape)} must both be [n]"
        )
    lengths = response_lengths.to(torch.int64)
    if bool((lengths < 0).any()):
        raise ValueError(f"response length {int(lengths.min())} is negative")
    active = lengths > 0
    one = torch.ones(lengths.shape, dtype=torch.float64, device=lengths.device)
    if not bool(active.any()):
        return torch.zeros_like(one)
    samples = active.sum().double()
    if mode == "token-mean":
        weights = one / lengths.sum().double()
    elif mode == "group-token-mean":
        _, group = torch.unique(group_ids, return_inverse=True)
        per_group = torch.zeros(int(group.max()) + 1, dtype=torch.int64, device=lengths.device).index_add_(
            0, group, lengths
        )
        weights = one / ((per_group > 0).sum().double() * per_group[group].clamp(min=1).double())
    elif mode == "seq-mean-token-mean":
        weights = one / (samples * lengths.clamp(min=1).double())
    elif mode == "seq-mean-token-sum":
        weights = one / samples
    else:
        if max_response_length < 1:
            raise ValueError(f"max_response_length={max_response_length} must be positive for seq-mean-token-sum-norm")
        weights = one / (samples * max_response_length)
    return torch.where(active, weights, torch.zeros_like(weights))


def aggregate_loss(token_loss: Tensor, weights: Tensor, sample_index: Tensor) -> Tensor:
    """This micro-batch's part of the mini-batch loss: `sum_t weights[sample_index[t]] * token_loss[t]`.

    Args:
        token_loss: `[N]`, 0 where masked.
        weights: `[n]` float64 from `token_weights`.
        sample_index: `[N]` row of `weights` that each token belongs to.

    Returns:
        float64 scalar; the sum of all parts over micro-batches and data-parallel ranks is the loss. 0 for an empty
        micro-batch, still connected to the graph of `token_loss`.
    """
    if token_loss.shape != sample_index.shape:
        raise ValueError(f"token_loss has shape {tuple(token_loss.shape)}, sample_index {tuple(sample_index.shape)}")
    return (token_loss.double() * weights.to(token_loss.device)[sample_index]).sum()
