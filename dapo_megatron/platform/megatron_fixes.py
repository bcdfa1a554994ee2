"""Corrections of Megatron-Core 0.16 that are needed on every device.

On pipelines: in an interleaved pipeline of two ranks both neighbours of a rank are the same rank. Messages between two ranks of one
group match only in the order in which they are posted, and where there are few micro-batches the two ranks post a
forward and a backward message in different orders: an activation meets a gradient, or a shape. (Megatron's own launcher
forbids some of these pipelines.) Here each direction of travel has a channel of its own: a tag under gloo, a process
group under NCCL, which ignores tags.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_FORWARD, _BACKWARD = 1, 2  # tags


@dataclass(frozen=True)
class _Channels:
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    shapes: dist.ProcessGroup


# Shapes on their way, with their buffers; far more than a schedule can have in flight.
_sent_shapes: deque[tuple[Any, torch.Tensor]] = deque()
_MOST_SENT_SHAPES = 256

_channels: dict[tuple[int, ...], _Channels] = {}


def create_pipeline_channels(pp_group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Create the groups that the stages of every pipeline talk over. Collective over the whole job, once per layout.

    Args:
        timeout: longest wait for a neighbour.
    """
    mine = tuple(dist.get_process_group_ranks(pp_group))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for ranks in sorted(set(everyone)):
        if dist.get_backend(pp_group) == "gloo":
            channels = _Channels(pp_group, pp_group, pp_group)
        else:
            # Shapes go over gloo: no device has to wait for them.
            backward = dist.new_group(list(ranks), timeout=timeout)
            shapes = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            channels = _Channels(pp_group, backward, shapes)
        if ranks == mine:
            _channels[ranks] = channels


def forget_pipeline_channels() -> None:
    """Drop what belongs to groups that are about to be destroyed."""
    _channels.clear()
    _sent_shapes.clear()


def separate_pipeline_directions() -> None:
    """Replace Megatron's exchange of shapes and of tensors between stages (not batched) by ones with two channels."""
    from megatron.core.pipeline_parallel import p2p_communication

    def exchange_shapes(
        self: Any,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        group = _channels[tuple(dist.get_process_group_ranks(self.pp_group))].shapes
        sends = ((tensor_send_next, self.next_rank, _FORWARD), (tensor_send_prev, self.prev_rank, _BACKWARD))
        for tensor, peer, tag in sends:
            if tensor is not None:
                shape = torch.tensor(tensor.size(), dtype=torch.int64, device="cpu")
                _sent_shapes.append((dist.isend(shape, dst=peer, group=group, tag=tag), shape))
        received = [torch.zeros(3, dtype=torch.int64, device="cpu") for _ in range(2)]
        works = []
        receives = ((recv_prev, self.prev_rank, _FORWARD), (recv_next, self.next_rank, _BACKWARD))
        for shape, (wanted, peer, tag) in zip(received, receives, strict=True):
            if wanted:
                works.append(dist.irecv(shape, src=peer, group=group, tag=tag))
        for work in works:
            work.wait()
        # A send is not waited for: the neighbour may take it in a later call than it takes the tensors of this one.
        while len(_sent_shapes) > _MOST_SENT_SHAPES:
            _sent_shapes.popleft()[0].wait()
        return received[0].tolist(), received[1].tolist()

    def exchange_tensors(
        *,
        tensor_send_prev: torch.Tensor | None,
        tensor_recv_prev: torch.Tensor | None,
        tensor_send_next: torch.Tensor | None,
        tensor_recv_next: torch.Tensor | None,
        group: dist.ProcessGroup,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> dict[str, Any]:
        channels = _channels[tuple(dist.get_process_group_ranks(group))]
        steps = [
            ("send_next", dist.isend, tensor_send_next, next_pipeline_rank, channels.forward, _FORWARD),
            ("recv_prev", dist.irecv, tensor_recv_prev, prev_pipeline_rank, channels.forward, _FORWARD),
            ("send_prev", dist.isend, tensor_send_prev, prev_pipeline_rank, channels.backward, _BACKWARD),
            ("recv_next", dist.irecv, tensor_recv_next, next_pipeline_rank, channels.backward, _BACKWARD),
        ]
        if group.rank() % 2:  # neighbours start with opposite ends, so that no two wait for each other
            steps = [steps[1], steps[0], steps[3], steps[2]]
        return {
            name: post(tensor, peer, group=channel, tag=tag)
            for name, post, tensor, peer, channel, tag in steps
            if tensor is not None
        }

    p2p_communication.P2PCommunicator._communicate_shapes = exchange_shapes
    p2p_communication._p2p_ops = exchange_tensors


def allow_local_latent_attention() -> None:
    """Let latent attention be built without Transformer Engine, with replicated down projections."""
    from megatron.core.transformer import multi_latent_attention

    from dapo_megatron.platform.replicated_linear import ReplicatedLinear

    # True wherever the module that wraps Transformer Engine can be imported, which is always; its classes are mocks then.
    multi_latent_attention.HAVE_TE = False
    # The class that it takes for a linear layer that is not split.
    multi_latent_attention.Linear = ReplicatedLinear
