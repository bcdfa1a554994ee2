"""The few ways in which a Megatron parameter is made of HF tensors and split over tensor-parallel (TP) ranks.

Each rule knows both directions, and they are inverse: `merge([split(hf, r, n) for r in range(n)])` is `hf`, bit for bit.
HF linear weights are `[out, in]`, as Megatron's are; nothing is ever transposed. Rules work on any device, the
meta device included. Results may share memory with the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from checkpoint_convert.architecture import padded_vocab_size


class Rule(Protocol):
    """One way of splitting."""

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        """Return rank `tp_rank`'s shard of the parameter made of `hf`.

        Raises:
            ValueError: `tp_size` does not divide the split dimension.
        """
        ...

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the HF tensors from the shards of all TP ranks, in rank order."""
        ...


def _slice(tensor: Tensor, dim: int, tp_rank: int, tp_size: int) -> Tensor:
    size = tensor.shape[dim]
    if size % tp_size:
        raise ValueError(f"dimension {dim} of size {size} cannot be split over {tp_size} tensor-parallel ranks")
    return tensor.narrow(dim, tp_rank * (size // tp_size), size // tp_size)


@dataclass(frozen=True)
class Copy:
    """Every rank holds the whole tensor (norm weights)."""

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        (tensor,) = hf
        return tensor

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True)
class Column:
    """Output features (dimension 0) are split."""

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        (tensor,) = hf
        return _slice(tensor, 0, tp_rank, tp_size)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=0),)


@dataclass(frozen=True)
class Row:
    """Input features (dimension 1) are split."""

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        (tensor,) = hf
        return _slice(tensor, 1, tp_rank, tp_size)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=1),)


@dataclass(frozen=True)
class QKV:
    """Query, key and value projections (weights or biases) fused per query group.

    The fused parameter is `[num_query_groups x (query heads of the group, key, value) x head_dim, ...]`, cut along
    dimension 0 into equal parts. With more ranks than groups a part does not end on a head: Megatron gathers the
    projection's output and picks its heads itself (`SelfAttention.get_query_key_value_tensors`).
    """

    num_attention_heads: int
    num_query_groups: int
    head_dim: int

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        rest = hf[0].shape[1:]
        per_group = [tensor.reshape(self.num_query_groups, -1, *rest) for tensor in hf]
        return _slice(torch.cat(per_group, dim=1).reshape(-1, *rest), 0, tp_rank, tp_size)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rest = shards[0].shape[1:]
        fused = torch.cat(list(shards), dim=0).reshape(self.num_query_groups, -1, *rest)
        query = self.num_attention_heads // self.num_query_groups * self.head_dim
        parts = fused.split([query, self.head_dim, self.head_dim], dim=1)
        return tuple(part.reshape(-1, *rest) for part in parts)


@dataclass(frozen=True)
class GatedMLP:
    """Gate and up projections in one parameter: each rank holds its slice of the gate, then its slice of up."""

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        return torch.cat([_slice(tensor, 0, tp_rank, tp_size) for tensor in hf], dim=0)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return tuple(torch.cat([half[i] for half in halves], dim=0) for i in range(2))


@dataclass(frozen=True)
class FusedGatedMLP:
    """`GatedMLP` of one HF tensor that holds the gate's rows, then the up projection's."""

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        (tensor,) = hf
        return GatedMLP().split(tensor.chunk(2, dim=0), tp_rank, tp_size)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(GatedMLP().merge(shards), dim=0),)


@dataclass(frozen=True)
class Vocab:
    """Vocabulary rows, padded with zero rows to `padded_vocab_size` and split along dimension 0. `merge` drops the padding."""

    vocab_size: int

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        (tensor,) = hf
        rows = padded_vocab_size(self.vocab_size, tp_size) // tp_size
        first = min(tp_rank * rows, self.vocab_size)
        part = tensor[first : min(first + rows, self.vocab_size)]
        if part.shape[0] == rows:
            return part
        return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])], dim=0)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=0)[: self.vocab_size],)
