"""Hugging Face tensors from a sharded Megatron model, bucket by bucket.

Within a tensor-parallel group the shards of a bucket are cast and gathered in one collective to the publisher, which merges
them by the same mapping that the converter and the loader use. Replicated tensors are not gathered: the publisher has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from checkpoint_convert.mapping import ParamMapping
from checkpoint_convert.rules import Copy
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.actor.weights import named_global_parameters

NamedTensor = tuple[str, Tensor]


def gather_buckets(
    chunks: list[torch.nn.Module],
    mapping: Mapping[str, ParamMapping],
    layout: Layout,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> Iterator[list[NamedTensor]]:
    """Yield this pipeline stage's weights as HF tensors; only the publisher's lists are filled.

    All ranks of the first data-parallel replica must run the iterator to its end, in step with their TP group.

    Args:
        dtype: what tensors are cast to before they are gathered.
        bucket_bytes: a bucket is closed once its merged tensors reach this size; it always holds at least one parameter.
    """
    bucket: list[tuple[ParamMapping, Tensor]] = []
    size = 0
    for name, param in named_global_parameters(chunks):
        entry = mapping[name]
        if entry.tied_copy:  # the first stage sends the embedding
            continue
        bucket.append((entry, param.detach()))
        merged = param.numel() * (1 if isinstance(entry.rule, Copy) else layout.tp_size)
        size += merged * dtype.itemsize
        if size >= bucket_bytes:
            yield _merge(bucket, layout, dtype)
            bucket, size = [], 0
    if bucket:
        yield _merge(bucket, layout, dtype)


def _merge(bucket: list[tuple[ParamMapping, Tensor]], layout: Layout, dtype: torch.dtype) -> list[NamedTensor]:
    shards_of: dict[int, list[Tensor]] = {}
    split = [
        (i, p.to(dtype))
        for i, (entry, p) in enumerate(bucket)
        if layout.tp_size > 1 and not isinstance(entry.rule, Copy)
    ]
    if split:
        flat = torch.cat([p.reshape(-1) for _, p in split])
        group = parallel_state.get_tensor_model_parallel_group()
        pieces = [torch.empty_like(flat) for _ in range(layout.tp_size)] if layout.tp_rank == 0 else None
        dist.gather(flat, pieces, dst=parallel_state.get_tensor_model_parallel_src_rank(), group=group)
        offset = 0
        for i, p in split:
            if pieces is not None:
                shards_of[i] = [piece[offset : offset + p.numel()].view(p.shape) for piece in pieces]
            offset += p.numel()
    if not layout.is_publisher:
        return []
    merged: list[NamedTensor] = []
    for i, (entry, p) in enumerate(bucket):
        if i in shards_of:
            shards = shards_of[i]
        elif isinstance(entry.rule, Copy):
            shards = [p.to(dtype)] * layout.tp_size
        else:
            shards = [p.to(dtype)]
        merged += entry.merge(shards)
    return merged


def collect_on_rank_zero(
    buckets: Iterator[list[NamedTensor]], layout: Layout, stage_publishers: list[int]
) -> Iterator[NamedTensor]:
    """Bring every stage's tensors to global rank 0, stage by stage; other ranks yield nothing.

    All ranks of the job must run the iterator to its end.

    Args:
        buckets: this rank's `gather_buckets`; empty on data-parallel replicas other than the first.
        stage_publishers: global rank of each pipeline stage's publisher, in stage order; the first is rank 0.
    """
    if layout.dp_rank != 0:
        return
    own_stage_done = False
    for stage, publisher in enumerate(stage_publishers):
        if layout.pp_rank == stage:
            for bucket in buckets:
                if layout.rank == 0:
                    yield from bucket
                elif layout.is_publisher:
                    _send(bucket, layout)
            own_stage_done = True
            if layout.is_publisher and layout.rank != 0:
                _send([], layout)
        elif layout.rank == 0:
            while tensors := _receive(publisher, layout):
                yield from tensors
    if not own_stage_done:
        raise RuntimeError(f"rank {layout.rank} of pipeline stage {layout.pp_rank} is missing from {stage_publishers}")


def _send(bucket: list[NamedTensor], layout: Layout) -> None:
    header = [[(name, tuple(t.shape), t.dtype) for name, t in bucket]]
    dist.send_object_list(header, dst=0, device=layout.device)
    for _, tensor in bucket:
        dist.send(tensor.contiguous(), dst=0)


def _receive(source: int, layout: Layout) -> list[NamedTensor]:
    header: list[list[tuple[str, tuple[int, ...], torch.dtype]]] = [[]]
    dist.recv_object_list(header, src=source, device=layout.device)
    tensors = []
    for name, shape, dtype in header[0]:
        tensor = torch.empty(shape, dtype=dtype, device=layout.device)
        dist.recv(tensor, src=source)
        tensors.append((name, tensor))
    return tensors


def stage_publishers(layout: Layout) -> list[int]:
    """Global rank of each pipeline stage's publisher, gathered once; the same list on all ranks."""
    mine = layout.rank if layout.is_publisher else -1
    gathered: list[tuple[int, int]] = [(-1, -1)] * layout.world_size
    dist.all_gather_object(gathered, (layout.pp_rank, mine))
    return [next(rank for stage, rank in gathered if stage == s and rank >= 0) for s in range(layout.pp_size)]
