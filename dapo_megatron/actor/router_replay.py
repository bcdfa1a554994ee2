"""Router replay: the routers choose the experts that the engine chose, with weights of their own.

An engine and a trainer that compute the same router in another order of operations, or in bf16, now and then choose other experts
for a token, and the two log-probs then differ by more than rounding (arXiv 2510.11370). Here only the choice is the engine's:
Megatron gathers the present scores at the given indices, so gradients flow into the router as ever; expert bias and group
limits, which only decide the choice, have no say.

Megatron (`moe/router_replay.py`, with `moe_enable_routing_replay`) gives each router an object with one current target for the
forward pass and a queue for recomputation in the backward pass. A pipeline runs several micro-batches forward before the first goes
back, but a chunk's micro-batches go back in the order in which they went forward, so the queue is right if it holds one entry for each
micro-batch that went forward with gradients, and none where nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from checkpoint_convert.parts import MixtureOfExperts


@dataclass(slots=True)
class _Router:
    """One router with replay.

    Attributes:
        layer: number from 0 in the whole model.
        column: number among the layers with experts.
        recomputed: whether activation recomputation may call the router again in the backward pass.
        queued: choices put into its queue since the schedule began.
    """

    replay: RouterReplay
    device: torch.device
    layer: int
    column: int
    recomputed: bool
    queued: int = 0


class EngineRouting:
    """Hands the engine's choices to the routers of this rank's chunks.

    Args:
        chunks: Megatron model chunks of this rank, as the schedules call them. Routers that were built without
            `moe_enable_routing_replay` choose for themselves.
        moe: of the model; None if it is dense.
        sequence_rank, sequence_size: this rank's slice of the tokens under sequence parallelism; 0 of 1 without.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        moe: MixtureOfExperts | None,
        sequence_rank: int = 0,
        sequence_size: int = 1,
    ) -> None:
        self._sequence = sequence_rank, sequence_size
        self._routers: dict[torch.nn.Module, list[_Router]] = {chunk: [] for chunk in chunks}
        if moe is None:
            return
        for chunk, routers in self._routers.items():
            for module in chunk.modules():
                if isinstance(module, TopKRouter) and module.router_replay is not None:
                    layer = int(module.layer_number) - 1
                    config = module.config
                    recomputed = config.recompute_granularity == "full" or (
                        config.recompute_granularity == "selective" and "moe" in config.recompute_modules
                    )
                    column = sum(moe.moe_layers[:layer])
                    routers.append(_Router(module.router_replay, module.weight.device, layer, column, recomputed))

    @contextmanager
    def micro_batch(self, chunk: torch.nn.Module, routed_experts: Tensor | None) -> Iterator[None]:
        """Inside, `chunk`'s forward pass routes as told. Enter it around the call of the chunk only, within `schedule()`.

        Args:
            routed_experts: `[T, moe_layers, top_k]`, any integer dtype and device, of the tokens that this rank computes before the slice of
                sequence parallelism (after that of context parallelism). None: the routers choose for themselves.

        Raises:
            ValueError: the tokens cannot be sliced, or micro-batches with and without choices are mixed in a training pass.
        """
        routers = self._routers[chunk]
        if routed_experts is None:
            if any(router.queued for router in routers):
                raise ValueError(
                    "a micro-batch without expert choices after one with: recomputation could not tell them apart"
                )
            for router in routers:
                router.replay.clear_router_replay_action()
            yield
            return
        rank, size = self._sequence
        if routed_experts.shape[0] % size:
            raise ValueError(f"{routed_experts.shape[0]} tokens cannot be split over {size} sequence-parallel ranks")
        mine = routed_experts.chunk(size)[rank]
        for router in routers:
            target = mine[:, router.column].to(dtype=torch.int64, device=router.device)
            if router.recomputed and torch.is_grad_enabled():
                router.replay.set_target_indices(target)
                router.queued += 1
            else:
                router.replay.target_topk_idx = target
            router.replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
        finally:
            for router in routers:
                router.replay.target_topk_idx = None
                # From here on the router is only called to recompute this or an earlier micro-batch. Where that is not
                # foreseen the queue is empty and the call fails, rather than choose by itself.
                router.replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Around one call of Megatron's schedule; afterwards the routers choose for themselves and hold no choices.

        Raises:
            RuntimeError: a layer was recomputed for some of the micro-batches only.
        """
        routers = [router for routers in self._routers.values() for router in routers]
        try:
            yield
            for router in routers:
                left = len(router.replay.replay_backward_list)
                # All are left where `recompute_method: block` keeps the layer's activations.
                if left not in (0, router.queued):
                    raise RuntimeError(
                        f"layer {router.layer} was recomputed for {router.queued - left} of {router.queued} micro-batches, so "
                        "expert choices of one were replayed for another"
                    )
        finally:
            for router in routers:
                router.replay.clear_indices()
                router.replay.clear_router_replay_action()
                router.queued = 0
