"""Megatron's GPTModel as a policy: it scores given tokens instead of returning logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from dapo_megatron.actor.logprobs import linear_logprobs


@dataclass(frozen=True)
class Scoring:
    """Which tokens of a micro-batch are scored, and how.

    Attributes:
        rows: int64 `[R]`, positions of this rank's tokens whose hidden states predict the targets.
        targets: int64 `[R]`, token ids.
        temperature: divides the logits.
        vocab_size: true vocabulary; padding rows of the output layer take no probability.
        chunk: rows whose logits exist at a time.
    """

    rows: Tensor
    targets: Tensor
    temperature: float
    vocab_size: int
    chunk: int


class ScoringOutputLayer(ColumnParallelLinear):
    """The output layer, applied to the scored rows only and fused with the log-softmax, so that no `[T, V]` logits exist.

    A forward of the module itself, because Megatron's DDP hangs its parameter hooks on modules.
    """

    def forward(self, hidden: Tensor, weight: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Score rows of `hidden` `[T, 1, h]` (`[T / tp, 1, h]` under sequence parallelism).

        Returns:
            Log-probs and entropies, float32 `[R]` each.
        """
        weight = self.weight if weight is None else weight
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        rows = hidden[:, 0].index_select(0, scoring.rows)
        if not self.sequence_parallel:
            # After the selection, so that only the scored rows' gradients are summed over the ranks.
            rows = copy_to_tensor_model_parallel_region(rows, group=self.tp_group)
        return linear_logprobs(
            rows,
            weight,
            scoring.targets,
            temperature=scoring.temperature,
            vocab_size=scoring.vocab_size,
            tp_rank=self.tp_group.rank(),
            tp_group=self.tp_group,
            chunk=scoring.chunk,
        )


class PolicyModel(GPTModel):
    """A chunk of the policy. The last stage returns `(log-probs, entropies)`, the others hidden states.

    Args:
        embedding_scale: factor on the token embeddings (Gemma), None for 1.
        others: as GPTModel.
    """

    def __init__(self, *args: Any, embedding_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._embedding_scale = embedding_scale
        self._scoring: Scoring | None = None
        if self.post_process:
            # The layer as GPTModel made it, tied or not, with another forward.
            self.output_layer.__class__ = ScoringOutputLayer

    def forward(self, *args: Any, scoring: Scoring, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """As GPTModel's, plus what is to be scored (read on the last stage only)."""
        self._scoring = scoring
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._scoring = None

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._preprocess(*args, **kwargs)
        if self._embedding_scale is None or outputs[0] is None:
            return outputs
        embedded = outputs[0]
        # Rounded to the model's dtype first, as HF does.
        scale = torch.tensor(self._embedding_scale, dtype=embedded.dtype, device=embedded.device)
        return (embedded * scale, *outputs[1:])

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        if not self.post_process:
            return hidden_states
        assert self._scoring is not None
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_states, weight, self._scoring)
