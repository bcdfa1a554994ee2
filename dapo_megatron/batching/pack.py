"""Sequences of one micro-batch laid end to end, without padding between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Packed sequences and where their responses are.

    Attributes:
        tokens: int64 `[1, T]`, `prompt + response` of each sequence, one after the other, then padding
            (with `sequence_multiple`, padding after each).
        position_ids: int64 `[1, T]`, from 0 in each sequence.
        cu_seqlens: int32 `[n + 1]`, sequence i owns `[cu_seqlens[i], cu_seqlens[i + 1])`. Padding counts to the sequence before it,
            where causal attention keeps it from being seen; so the sequences cover all T tokens.
        rows: int64 `[R]`, positions in `[0, T)` whose logits predict response tokens: row t - 1 predicts token t.
        targets: int64 `[R]`, the response tokens, in the order of the sequences.
        sample_index: int64 `[R]`, the sequence (0..n-1) that each row belongs to.
        max_seqlen: longest sequence by `cu_seqlens`.
        routed_experts: uint8 or int16 `[T, moe_layers, top_k]`, experts that the engine sent the tokens to (`routing.py`); None: the model
            chooses for itself.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    rows: Tensor
    targets: Tensor
    sample_index: Tensor
    max_seqlen: int
    routed_experts: Tensor | None = None


def pack(
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    pad_to_multiple: int = 1,
    pad_id: int = 0,
    sequence_multiple: int = 1,
) -> PackedBatch:
    """Pack `(prompt_ids, response_ids)` pairs.

    Args:
        sequences: token ids of each sample, one-dimensional and not empty. No sequence at all gives `pad_to_multiple` padding tokens and no
            row: a rank short of samples still takes part in the collectives of a forward pass.
        pad_to_multiple: T is rounded up to this (`ParallelSection.token_alignment`); a multiple of `sequence_multiple`.
        pad_id: id of padding tokens; any id of the vocabulary will do, its logits are never read.
        sequence_multiple: each sequence's own length is rounded up to this first (`ParallelSection.sequence_alignment`).

    Raises:
        ValueError: an empty prompt (nothing predicts its first response token) or an empty response.
    """
    if pad_to_multiple < 1 or sequence_multiple < 1 or pad_to_multiple % sequence_multiple:
        raise ValueError(
            f"pad_to_multiple={pad_to_multiple} must be a positive multiple of sequence_multiple={sequence_multiple}"
        )
    pieces: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    lengths: list[int] = []
    offset = 0
    for index, (prompt, response) in enumerate(sequences):
        p, n = len(prompt), len(response)
        if p == 0 or n == 0:
            raise ValueError(f"sequence {index} has {p} prompt and {n} response tokens; both must be at least 1")
        filler = -(p + n) % sequence_multiple
        pieces += [np.asarray(prompt, dtype=np.int64), np.asarray(response, dtype=np.int64)]
        if filler:
            pieces.append(np.full(filler, pad_id, dtype=np.int64))
        positions.append(np.arange(p + n + filler, dtype=np.int64))
        rows.append(np.arange(offset + p - 1, offset + p + n - 1, dtype=np.int64))
        lengths.append(p + n + filler)
        offset += p + n + filler
    total = max(1, -(-offset // pad_to_multiple)) * pad_to_multiple
    padding = total - offset
    if padding:
        if not lengths:
            lengths.append(0)
        pieces.append(np.full(padding, pad_id, dtype=np.int64))
        positions.append(np.arange(lengths[-1], lengths[-1] + padding, dtype=np.int64))
        lengths[-1] += padding
    empty = np.zeros(0, dtype=np.int64)
    responses = [np.asarray(response, dtype=np.int64) for _, response in sequences]
    return PackedBatch(
        tokens=torch.from_numpy(np.concatenate(pieces))[None],
        position_ids=torch.from_numpy(np.concatenate(positions))[None],
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        rows=torch.from_numpy(np.concatenate([empty, *rows])),
        targets=torch.from_numpy(np.concatenate([empty, *responses])),
        sample_index=torch.from_numpy(
            np.repeat(np.arange(len(responses), dtype=np.int64), [len(r) for r in responses])
        ),
        max_seqlen=max(lengths),
    )
