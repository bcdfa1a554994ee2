"""From a ticket to this rank's micro-batches, with advantages and global token weights.

Everything that concerns more than one rank (advantages, denominators, the plan) comes from the ticket's scalars, so
all ranks agree without communicating. Tokens and log-probs are read from the object store for this rank's samples only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dapo_megatron.actor.actor import LossBatch
from dapo_megatron.algorithm import advantage_estimator, estimate_advantages, token_weights
from dapo_megatron.batching.cost import CostModel
from dapo_megatron.batching.pack import PackedBatch, pack
from dapo_megatron.batching.plan import MiniBatch, plan_step
from dapo_megatron.batching.routing import pack_routed_experts
from dapo_megatron.config.sections import RunConfig
from rollout_service.config import RoutingShape
from rollout_service.sample import Ticket, routed_experts_of

PackedGroup = dict[str, np.ndarray]


@dataclass(frozen=True)
class PreparedMicroBatch:
    """One micro-batch of this rank before the old log-probs are known; tensors have one entry per response token `[R]`."""

    samples: list[int]
    packed: PackedBatch
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor

    def with_old_logprobs(self, old_logprobs: Tensor | None, ref_logprobs: Tensor | None = None) -> LossBatch:
        return LossBatch(
            packed=self.packed,
            behaviour_logprobs=self.behaviour_logprobs,
            advantages=self.advantages,
            weights=self.weights,
            mask=self.mask,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
        )


@dataclass(frozen=True)
class StepBatch:
    """This rank's share of one training step.

    Attributes:
        mini_batches: micro-batches of each optimizer update.
        advantages: float32 `[N]` of all samples of the step, group-major, the same on every rank.
        response_tokens: response tokens of the whole step.
        total_tokens: prompt and response tokens of the whole step.
        filtered_share: share of the step's samples that overlong filtering takes out of the loss.
    """

    mini_batches: list[list[PreparedMicroBatch]]
    advantages: Tensor
    response_tokens: int
    total_tokens: int
    filtered_share: float

    @property
    def packed(self) -> list[PackedBatch]:
        """The packed sequences of all mini-batches, in order."""
        return [micro.packed for mini in self.mini_batches for micro in mini]


def assemble(
    ticket: Ticket,
    fetch: Callable[[list[Any]], list[PackedGroup]],
    config: RunConfig,
    *,
    dp_rank: int,
    dp_size: int,
    cost_model: CostModel | None = None,
    routing: RoutingShape | None = None,
) -> StepBatch:
    """Plan the step and read this rank's samples.

    Args:
        ticket: scalars and object references of the step's groups.
        fetch: resolves references in order (`ray.get`).
        cost_model: what ranks and micro-batches are balanced by; None is `CostModel()`.
        routing: of the model's routed experts, for router replay; None leaves the engines' choices aside.

    Raises:
        ValueError: a group in the store does not match its description in the ticket, or holds no expert choices for `routing`.
    """
    lengths = torch.from_numpy(np.concatenate([g.response_lengths for g in ticket.groups])).long()
    per_group = [len(g.response_lengths) for g in ticket.groups]
    prompt_lengths = np.repeat([g.prompt_length for g in ticket.groups], per_group)
    algorithm = config.algorithm
    advantages = estimate_advantages(
        advantage_estimator(algorithm.adv_estimator),
        [torch.from_numpy(np.asarray(g.rewards)) for g in ticket.groups],
        eps=algorithm.adv_eps,
        std=algorithm.adv_std,
    )
    trained = torch.ones_like(lengths, dtype=torch.bool)
    if algorithm.overlong_filtering:
        trained = ~torch.from_numpy(np.concatenate([g.truncated for g in ticket.groups]))
    plan = plan_step(
        prompt_lengths.tolist(),
        lengths.tolist(),
        config.trainer.mini_batch_prompts,
        config.rollout.n_samples_per_prompt,
        dp_size,
        config.max_micro_batch_tokens,
        cost_model=cost_model,
        micro_batch_multiple=config.parallel.micro_batch_multiple,
    )
    groups = _fetch_share(ticket, plan, fetch, dp_rank, config.rollout.n_samples_per_prompt)
    weights = _weights(plan, torch.where(trained, lengths, 0), config)
    mini_batches = [
        [
            _prepare(micro.samples, groups, advantages, weights, trained, config, routing)
            for micro in mini.micro_batches[dp_rank]
        ]
        for mini in plan
    ]
    return StepBatch(
        mini_batches=mini_batches,
        advantages=advantages,
        response_tokens=int(lengths.sum()),
        total_tokens=int(lengths.sum() + prompt_lengths.sum()),
        filtered_share=1.0 - float(trained.double().mean()),
    )


def _fetch_share(
    ticket: Ticket,
    plan: list[MiniBatch],
    fetch: Callable[[list[Any]], list[PackedGroup]],
    dp_rank: int,
    group_size: int,
) -> dict[int, PackedGroup]:
    mine = sorted({s // group_size for mini in plan for micro in mini.micro_batches[dp_rank] for s in micro.samples})
    packed = dict(zip(mine, fetch([ticket.refs[g] for g in mine]), strict=True))
    for index, group in packed.items():
        stored, announced = np.diff(group["offsets"]), ticket.groups[index].response_lengths
        if not np.array_equal(stored, announced):
            raise ValueError(
                f"step {ticket.step}: group {ticket.groups[index].order} holds responses of {stored.tolist()} tokens, "
                f"its ticket says {announced.tolist()}"
            )
    return packed


def _weights(plan: list[MiniBatch], lengths: Tensor, config: RunConfig) -> Tensor:
    """float64 `[N]`: weight of a token of each sample, with the denominators of the sample's mini-batch.

    `lengths` counts trained tokens; samples without any do not count.
    """
    weights = torch.zeros(len(lengths), dtype=torch.float64)
    for mini in plan:
        index = torch.tensor(mini.samples)
        group_ids = index // config.rollout.n_samples_per_prompt
        weights[index] = token_weights(
            config.algorithm.loss_agg_mode, lengths[index], group_ids, config.rollout.max_response_length
        )
    return weights


def _prepare(
    samples: Sequence[int],
    groups: dict[int, PackedGroup],
    advantages: Tensor,
    weights: Tensor,
    trained: Tensor,
    config: RunConfig,
    routing: RoutingShape | None,
) -> PreparedMicroBatch:
    group_size = config.rollout.n_samples_per_prompt
    sequences, behaviour = [], [np.zeros(0, dtype=np.float32)]
    for sample in samples:
        group = groups[sample // group_size]
        start, end = group["offsets"][sample % group_size : sample % group_size + 2]
        sequences.append((group["prompt_ids"], group["response_ids"][start:end]))
        behaviour.append(group["behaviour_logprobs"][start:end])
    packed = pack(
        sequences,
        pad_to_multiple=config.parallel.token_alignment,
        sequence_multiple=config.parallel.sequence_alignment,
    )
    if routing is not None:
        choices = [routed_experts_of(groups[s // group_size], s % group_size) for s in samples]
        packed = replace(packed, routed_experts=pack_routed_experts(choices, packed.cu_seqlens, routing))
    of_row = torch.tensor(list(samples), dtype=torch.int64)[packed.sample_index]
    return PreparedMicroBatch(
        samples=list(samples),
        packed=packed,
        behaviour_logprobs=torch.from_numpy(np.concatenate(behaviour)),
        advantages=advantages[of_row],
        weights=weights[of_row],
        mask=trained[of_row],
    )
