"""The engines' expert choices, laid beside the tokens of a packed micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollout_service.config import RoutingShape
from rollout_service.routed_experts import expert_dtype


def pack_routed_experts(choices: Sequence[np.ndarray], cu_seqlens: Tensor, shape: RoutingShape) -> Tensor:
    """Lay the choices of each sequence where its tokens are.

    Tokens without a choice are the last of each sequence and padding. No loss depends on their outputs, but a router must send
    them somewhere: they go round the experts, so that no expert gets more than its share of them.

    Args:
        choices: of each sequence `[p + n - 1, moe_layers, top_k]` (`Sample.routed_experts`).
        cu_seqlens: int32 `[sequences + 1]` of the packed tokens (`PackedBatch`).

    Returns:
        `[T, moe_layers, top_k]` of `expert_dtype(num_experts)`.

    Raises:
        ValueError: choices of another shape, or more than a sequence has tokens.
    """
    bounds = cu_seqlens.tolist()
    layers, top_k = len(shape.moe_layers), shape.top_k
    turns = (np.arange(bounds[-1])[:, None] * top_k + np.arange(top_k)) % shape.num_experts
    packed = np.repeat(turns.astype(expert_dtype(shape.num_experts))[:, None], layers, axis=1)
    for index, chosen in enumerate(choices):
        start, end = bounds[index : index + 2]
        if chosen.shape[1:] != (layers, top_k) or len(chosen) >= end - start:
            raise ValueError(
                f"sequence {index} of {end - start} packed tokens: expert choices have the shape {chosen.shape}, the model has "
                f"{layers} layers with experts and {top_k} experts a token"
            )
        packed[start : start + len(chosen)] = chosen
    return torch.from_numpy(packed)
