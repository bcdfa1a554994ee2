"""The Megatron actor: log-probs and policy updates of packed micro-batches, in any layout.

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
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from checkpoint_convert.architecture import ModelArchitecture
from checkpoint_convert.hf import HFReader
from checkpoint_convert.mapping import build_mapping
from dapo_megatron.actor.auxiliary_losses import mean_auxiliary_losses
from dapo_megatron.actor.model import build_model
from dapo_megatron.actor.optimizer import ActorOptimizer, StepResult
from dapo_megatron.actor.policy_model import Scoring
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.actor.reference import ReferenceWeights
from dapo_megatron.actor.router_replay import EngineRouting
from dapo_megatron.actor.weights import expert_biases, load_hf_weights, mark_tensor_parallel
from dapo_megatron.algorithm import Objective, TokenBatch
from dapo_megatron.batching.context_parallel import context_shard
from dapo_megatron.batching.pack import PackedBatch, pack
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
        expert_offset: global number of this rank's first routed expert.
    """

    def __init__(self, config: RunConfig, arch: ModelArchitecture, layout: Layout, platform: Platform) -> None:
        self.config = config
        self.arch = arch
        self.layout = layout
        self.mapping = build_mapping(arch, platform.layer_spec)
        self.chunks = build_model(arch, config, layout, platform)
        self.expert_offset = layout.expert_offset(arch.moe.num_experts if arch.moe else 0)
        mark_tensor_parallel(self.chunks, self.mapping, self.expert_offset)
        self.optimizer = ActorOptimizer(config, self.chunks)
        sequence = (layout.tp_rank, layout.tp_size) if config.parallel.sequence_parallel else (0, 1)
        self._routing = EngineRouting(self.chunks, arch.moe, *sequence)
        self._objective = Objective(config.algorithm)
        self._reference: ReferenceWeights | None = None
        self._temperature = config.rollout.sampling.temperature

    def load_hf(self, path: str) -> None:
        """Load weights from a Hugging Face folder; with a KL term they are also the reference policy."""
        with HFReader(path) as reader:
            experts = self.arch.moe.num_experts if self.arch.moe else 0
            load_hf_weights(self.chunks, reader, self.mapping, self.layout, experts)
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

        def collect(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            logprobs, entropy = pair
            return logprobs.new_zeros(()), _NO_TOKENS, {"logprobs": logprobs, "entropy": entropy}

        def forward_step(iterator: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            return self._forward(next(iterator), model, temperature), collect

        # An interleaved pipeline takes micro-batches in whole rounds.
        multiple = self.config.parallel.micro_batch_multiple
        parallel = self.config.parallel
        empty = pack([], pad_to_multiple=parallel.token_alignment, sequence_multiple=parallel.sequence_alignment)
        filler = [empty] * (-len(batches) % multiple)
        with torch.no_grad():
            outputs = self._run_schedule(forward_step, [*batches, *filler], lambda batch: batch, forward_only=True)
        return [(out["logprobs"], out["entropy"]) for out in outputs[: len(batches)]]

    def update(self, batches: Sequence[LossBatch]) -> UpdateResult:
        """One optimizer update on this rank's micro-batches of a mini-batch."""
        biases = expert_biases(self.chunks)
        before = [bias.clone() for bias in biases]
        metrics = self.accumulate_gradients(batches)
        step = self.optimizer.step()
        if not step.applied:
            # Megatron moves the routers' selection biases when it reduces the gradients.
            for bias, value in zip(biases, before, strict=True):
                bias.copy_(value)
        return UpdateResult(step=step, metrics=metrics)

    def gather_parameters(self) -> None:
        """Bring every replica's weights up to date after the last update of a step; collective.

        Nothing is left to do unless megatron.overlap_param_gather defers it to the next forward pass.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def accumulate_gradients(self, batches: Sequence[LossBatch]) -> dict[str, float]:
        """Forward and backward of a mini-batch; gradients end up reduced over replicas, nothing is applied."""
        self.optimizer.zero_grad()

        def forward_step(iterator: Iterator[LossBatch], model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            batch = next(iterator)
            return self._forward(batch.packed, model, self._temperature), partial(self._loss, batch)

        tokens = sum(batch.packed.tokens.shape[1] for batch in batches)
        with mean_auxiliary_losses(self.chunks[0].config, tokens, self.layout.device):
            outputs = self._run_schedule(forward_step, batches, lambda batch: batch.packed, forward_only=False)
        return _reduce_metrics(outputs if self.layout.reports_loss else [], self.layout.device)

    def _run_schedule(
        self,
        forward_step: Callable[..., Any],
        batches: Sequence[Any],
        packed: Callable[[Any], PackedBatch],
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        if not batches:
            raise ValueError("no micro-batch: every rank needs at least one, an empty one included")
        chunks = len(self.chunks)
        with self._routing.schedule():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches) if chunks == 1 else [iter(batches) for _ in self.chunks],
                model=self.chunks if chunks > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=max(packed(batch).tokens.shape[1] for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _forward(self, packed: PackedBatch, model: torch.nn.Module, temperature: float) -> Any:
        """Hidden states, or on the last stage `(log-probs, entropies)`, float32 `[R]` each."""
        device, cp = self.layout.device, self.layout.cp_size
        shard = context_shard(packed, cp, self.layout.cp_rank) if cp > 1 else None
        part = packed if shard is None else shard
        bounds = packed.cu_seqlens.to(device)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
        )
        scoring = Scoring(
            rows=part.rows.to(device),
            targets=(packed.targets if shard is None else packed.targets[shard.order]).to(device),
            temperature=temperature,
            vocab_size=self.arch.vocab_size,
            chunk=self.config.trainer.logprob_chunk_tokens,
        )
        experts = packed.routed_experts
        if experts is not None and shard is not None:
            experts = experts[shard.index]
        with self._routing.micro_batch(model, experts):
            output = model(
                part.tokens.to(device), part.position_ids.to(device), None, packed_seq_params=params, scoring=scoring
            )
        if shard is None or isinstance(output, Tensor):
            return output
        return tuple(_from_context_ranks(values, shard.order.to(device), packed.targets.numel()) for values in output)

    def _loss(self, batch: LossBatch, scored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the mini-batch loss, float32 scalar, with metric sums."""
        device = self.layout.device
        logprobs, entropy = scored
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
        return total.float(), _NO_TOKENS, metrics


def _from_context_ranks(values: Tensor, order: Tensor, total: int) -> Tensor:
    """All `[total]` values on every context-parallel rank; each rank's gradient flows to its own values only.

    The loss looks at whole sequences, so every rank computes all of it. Backward is the identity, because the ranks'
    parameter gradients, each from its own tokens, are added up later.
    """
    full = values.new_zeros(total).index_copy(0, order, values)
    return reduce_from_tensor_model_parallel_region(full, group=parallel_state.get_context_parallel_group())


# What Megatron's schedules take as a token count; nothing divides by it (`transformer_config._finalize_summed_grads`).
_NO_TOKENS = torch.zeros((), dtype=torch.int)


def _reduce_metrics(outputs: list[dict[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Add metric sums over micro-batches and reporting ranks (`*_max` by maximum); every rank gets the result."""
    names: list[list[str]] = [sorted(outputs[0])] if outputs else [[]]
    # Stages before the last do not know the names: the last rank of the job is always on the last stage.
    dist.broadcast_object_list(names, src=reporting_rank(), device=device)
    keys = names[0]
    sums = torch.zeros(len(keys), dtype=torch.float64, device=device)
    maxima = torch.full((len(keys),), -torch.inf, dtype=torch.float64, device=device)
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
