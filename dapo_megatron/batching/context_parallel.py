"""Which tokens of a packed micro-batch a context-parallel rank computes.

Each sequence is cut into 2 x CP equal pieces; rank r takes piece r and piece 2 x CP - 1 - r, so that under causal attention
every rank has the same work. This is the split that Transformer Engine's attention expects for packed (THD) sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_megatron.batching.pack import PackedBatch


@dataclass(frozen=True, slots=True)
class ContextShard:
    """One rank's tokens of a packed batch.

    Attributes:
        tokens, position_ids: int64 `[1, T / cp]`, sequence by sequence, the earlier piece first.
        index: int64 `[T / cp]`, their places among the batch's T tokens.
        rows: int64 `[r]`, positions in this shard whose hidden states predict response tokens.
        order: int64 `[r]`, which of the batch's R response tokens each of them predicts; over all ranks a permutation of `0..R-1`.
    """

    tokens: Tensor
    position_ids: Tensor
    index: Tensor
    rows: Tensor
    order: Tensor


def context_shard(packed: PackedBatch, cp_size: int, cp_rank: int) -> ContextShard:
    """Return rank `cp_rank`'s share of `packed`.

    Raises:
        ValueError: a sequence's length is not a multiple of `2 * cp_size` (see `pack`'s `sequence_multiple`).
    """
    lengths = packed.cu_seqlens.diff().tolist()
    pieces = []
    for start, length in zip(packed.cu_seqlens.tolist(), lengths, strict=False):
        if length % (2 * cp_size):
            raise ValueError(
                f"a sequence of {length} tokens cannot be cut into 2 x {cp_size} equal pieces; pad it when packing"
            )
        size = length // (2 * cp_size)
        for piece in (cp_rank, 2 * cp_size - 1 - cp_rank):
            pieces.append(torch.arange(start + piece * size, start + (piece + 1) * size))
    index = torch.cat(pieces)
    place = torch.full((packed.tokens.shape[1],), -1, dtype=torch.int64)
    place[index] = torch.arange(index.numel())
    local = place[packed.rows.cpu()]
    order = (local >= 0).nonzero()[:, 0]
    return ContextShard(
        tokens=packed.tokens[:, index],
        position_ids=packed.position_ids[:, index],
        index=index,
        rows=local[order],
        order=order,
    )
