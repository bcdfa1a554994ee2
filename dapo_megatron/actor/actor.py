"""The Megatron actor: log-probs and policy updates of packed micro-batches, in any TP x PP x DP layout.

Every rank calls the same methods in the same order with its own data-parallel share. Losses carry global token
weights, so gradients are sums over micro-batches and replicas and never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from checkpoint_convert.architecture import ModelArchitecture
from checkpoint_convert.hf import HFReader
from checkpoint_convert.mapping import build_mapping
from dapo_megatron.actor.logprobs import vocab_parallel_logprobs
from dapo_megatron.actor.model import build_model
from dapo_megatron.actor.optimizer import ActorOptimizer, StepResult
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.actor.reference import ReferenceWeights
from dapo_megatron.actor.weights import load_hf_weights, mark_tensor_parallel
from dapo_megatron.algorithm import Objective, TokenBatch
from dapo_megatron.batching.pack import PackedBatch
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.platform import Platform


@dataclass(frozen=True)
class LossBatch:
    """One packed micro-batch with what the loss needs for each of its R response tokens.

    Attributes:
        packed: token ids and bounds.
        behaviour_logprobs, advantages: float32 `[R]`.
        weights: float64 `[R]`, global aggregation weight of each token.
        mask: bool `[R]`, true where a token is trained.
        old_logprobs: float32 `[R]`; None on pipeline stages before the last, which compute no loss, and in `bypass` mode.
        ref_logprobs: the same under the reference policy; None also without a KL term.
    """

    packed: PackedBatch
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Outcome of one optimizer update; `metrics` are sums (or maxima, `*_max`) over the whole mini-batch, equal on all ranks."""

    step: StepResult
    metrics: dict[str, float]


class Actor:
    """The policy being trained.

    Attributes:
        chunks: Megatron model chunks of this rank.
        mapping: Megatron parameter name to Hugging Face tensors.
    """

    def __init__(self, config: RunConfig, arch: ModelArchitecture, layout: Layout, platform: Platform) -> None:
        self.config = config
        self.arch = arch
        self.layout = layout
        self.mapping = build_mapping(arch, platform.layer_spec)
        self.chunks = build_model(arch, config, layout, platform)
        mark_tensor_parallel(self.chunks, self.mapping)
        self.optimizer = ActorOptimizer(config, self.chunks)
        self._objective = Objective(config.algorithm)
        self._reference: ReferenceWeights | None = None
        self._temperature = config.rollout.sampling.temperature
        self._tp_group = parallel_state.get_tensor_model_parallel_group()

    def load_hf(self, path: str) -> None:
        """Load weights from a Hugging Face folder; with a KL term they are also the reference policy."""
        with HFReader(path) as reader:
            load_hf_weights(self.chunks, reader, self.mapping, self.layout)
        self.optimizer.reload_main_params()
        if self.config.algorithm.kl.coef > 0:
            self.keep_reference()

    def keep_reference(self) -> None:
        """Copy the present weights to host memory as the reference policy."""
        self._reference = ReferenceWeights(self.chunks)

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probs of the response tokens under the reference policy, at the sampling temperature.

        Returns:
            On the last pipeline stage one float32 `[R]` tensor per micro-batch; elsewhere an empty list.

        Raises:
            RuntimeError: no reference was kept.
        """
        if self._reference is None:
            raise RuntimeError("no reference policy: load weights with algorithm.kl.coef above 0 first")
        with self._reference.swapped_in():
            return [logprobs for logprobs, _ in self.logprobs(batches)]

    def logprobs(self, batches: Sequence[PackedBatch], temperature: float | None = None) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies of the response tokens of each micro-batch, without gradient.

        Returns:
            On the last pipeline stage one pair of float32 `[R]` tensors per micro-batch; elsewhere an empty list.
        """
        temperature = self._temperature if temperature is None else temperature

        def collect(packed: PackedBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            pair = self._token_logprobs(packed, logits, temperature)
            return logits.new_zeros(()), torch.zeros((), dtype=torch.int), {"logprobs": pair[0], "entropy": pair[1]}

        def forward_step(iterator: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            packed = next(iterator)
            return self._forward(packed, model), partial(collect, packed)

        with torch.no_grad():
            outputs = self._run_schedule(forward_step, batches, [b.tokens.shape[1] for b in batches], forward_only=True)
        return [(out["logprobs"], out["entropy"]) for out in outputs]

    def update(self, batches: Sequence[LossBatch]) -> UpdateResult:
        """One optimizer update on this rank's micro-batches of a mini-batch."""
        self.accumulate_gradients(batches)
        return UpdateResult(step=self.optimizer.step(), metrics=self._reduced)

    def accumulate_gradients(self, batches: Sequence[LossBatch]) -> dict[str, float]:
        """Forward and backward of a mini-batch; gradients end up reduced over replicas, nothing is applied."""
        self.optimizer.zero_grad()

        def forward_step(iterator: Iterator[LossBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)
            return self._forward(batch.packed, model), partial(self._loss, batch)

        outputs = self._run_schedule(
            forward_step, batches, [b.packed.tokens.shape[1] for b in batches], forward_only=False
        )
        self._reduced = _reduce_metrics(outputs if self.layout.reports_loss else [], self.layout.device)
        return self._reduced

    def _run_schedule(
        self, forward_step: Callable[..., Any], batches: Sequence[Any], lengths: list[int], forward_only: bool
    ) -> list[dict[str, Tensor]]:
        if not batches:
            raise ValueError("no micro-batch: every rank needs at least one, an empty one included")
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, packed: PackedBatch, model: torch.nn.Module) -> Tensor:
        device = self.layout.device
        bounds = packed.cu_seqlens.to(device)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
        )
        return model(packed.tokens.to(device), packed.position_ids.to(device), None, packed_seq_params=params)

    def _token_logprobs(self, packed: PackedBatch, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`logits` is `[1, T, V / tp]`; returns log-probs and entropies, float32 `[R]` each."""
        device = self.layout.device
        return vocab_parallel_logprobs(
            logits.squeeze(0),
            packed.rows.to(device),
            packed.targets.to(device),
            temperature=temperature,
            vocab_size=self.arch.vocab_size,
            tp_rank=self.layout.tp_rank,
            tp_group=self._tp_group,
            chunk=self.config.trainer.logprob_chunk_tokens,
        )

    def _loss(self, batch: LossBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mini-batch loss, float32 scalar, with metric sums."""
        device = self.layout.device
        logprobs, entropy = self._token_logprobs(batch.packed, logits, self._temperature)
        total, metrics = self._objective(
            TokenBatch(
                logprobs=logprobs,
                entropy=entropy,
                behaviour_logprobs=batch.behaviour_logprobs.to(device),
                old_logprobs=None if batch.old_logprobs is None else batch.old_logprobs.to(device),
                ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs.to(device),
                advantages=batch.advantages.to(device),
                weights=batch.weights.to(device),
                mask=batch.mask.to(device),
                sequence_ids=batch.packed.sample_index.to(device),
            )
        )
        return total.float(), torch.zeros((), dtype=torch.int, device=device), metrics


def _reduce_metrics(outputs: list[dict[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Add metric sums over micro-batches and reporting ranks (`*_max` by maximum); every rank gets the result."""
    names: list[list[str]] = [sorted(outputs[0])] if outputs else [[]]
    # Stages before the last do not know the names: the last rank of the job is always on the last stage.
    dist.broadcast_object_list(names, src=reporting_rank(), device=device)
    keys = names[0]
    sums = torch.zeros(len(keys), dtype=torch.float64, device=device)
    maxima = torch.zeros(len(keys), dtype=torch.float64, device=device)
    for output in outputs:
        values = torch.stack([output[key].double() for key in keys]).to(device)
        sums += values
        maxima = torch.maximum(maxima, values)
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return {key: float(maxima[i] if key.endswith("_max") else sums[i]) for i, key in enumerate(keys)}


def reporting_rank() -> int:
    """Global rank of TP rank 0, DP rank 0 on the last stage, known to everybody."""
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    # Megatron's default order is tp-cp-ep-dp-pp: the first rank of the last pipeline block.
    return dist.get_world_size() // pp * (pp - 1)
