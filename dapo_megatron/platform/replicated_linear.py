"""A linear layer that every tensor-parallel rank holds whole: what Megatron-Core has only from Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class ReplicatedLinear(torch.nn.Module):
    """The down projections of latent attention (`TELinear` with `parallel_mode="duplicated"`).

    Megatron's local layers split them by columns and gather the result; the gradient of the rotary key, to which every rank
    contributes through its own heads, is not summed over the ranks then. Under sequence parallelism each rank projects its own
    tokens, and the weight is marked so that Megatron sums its gradient over the ranks.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, bias: bool = False, **_: Any
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("a replicated linear layer with a bias is not supported")
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """One tensor without tensor-parallel axes, for `dist_checkpointing`."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {}, sharded_offsets)
