"""Buckets of the transfer plan, gathered from the ranks that hold their shards and merged into Hugging Face tensors.

Within a tensor-parallel group (for routed experts: an expert-tensor-parallel group) every other member sends its
shards of a bucket to the publisher, cast and in one piece; the publisher merges them by the mapping that the converter
and the loader use, too. What is replicated is not sent: the publisher has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from checkpoint_convert.mapping import ParamMapping
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.actor.weights import named_global_parameters
from dapo_megatron.resharder.plan import Bucket, TransferPlan
from dapo_megatron.resharder.transport import WeightSyncError

NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True)
class GatheredBucket:
    """The shards of one bucket on its publisher, in the dtype that is sent; at most one bucket's worth of memory.

    Attributes:
        shards: for each key of the bucket the shards in the order of the group, a single one if it is not split.
    """

    bucket: Bucket
    mapping: Mapping[str, ParamMapping]
    shards: list[list[Tensor]]

    def merge(self) -> list[NamedTensor]:
        """The bucket's HF tensors, contiguous, in the order in which they are sent; gives up the shards."""
        merged: list[NamedTensor] = []
        for index, key in enumerate(self.bucket.keys):
            pairs = self.mapping[key].merge(self.shards[index])
            merged += [(name, tensor.contiguous()) for name, tensor in pairs]
            self.shards[index] = []
        return merged


class ShardedWeights:
    """This rank's part of the model, and its share in gathering the buckets of a plan."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        mapping: Mapping[str, ParamMapping],
        layout: Layout,
        expert_offset: int,
        plan: TransferPlan,
        *,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        """
        Args:
            dtype: what parameters are cast to before they are gathered; buffers stay float32.
            timeout_s: longest time in which a rank may be held up by an engine before it takes part in a gather; other
                ranks wait twice as long for it.

        Raises:
            RuntimeError: this rank lacks a parameter that the plan expects of it.
        """
        self.mapping = mapping
        self.layout = layout
        self.plan = plan
        self.dtype = dtype
        self._timeout = timedelta(seconds=2 * timeout_s)
        # The parameters themselves: whoever exchanges their data between updates is followed.
        self._tensors = dict(named_global_parameters(chunks, mapping, expert_offset))
        for bucket in plan.buckets:
            for key, split in zip(bucket.keys, bucket.split, strict=True):
                ranks = bucket.group if split else (bucket.publisher,)
                if layout.rank in ranks and key not in self._tensors:
                    raise RuntimeError(f"rank {layout.rank} does not hold {key}, which the transfer plan expects of it")

    def gather(self, bucket: Bucket) -> GatheredBucket | None:
        """Take part in gathering `bucket`. The ranks of `bucket.group` call it in the order of the plan; others may.

        Returns:
            The shards on the publisher, None elsewhere.

        Raises:
            WeightSyncError: another rank did not take part in time; names it.
        """
        rank = self.layout.rank
        if rank not in bucket.group:
            return None
        split = [key for key, is_split in zip(bucket.keys, bucket.split, strict=True) if is_split]
        if rank != bucket.publisher:
            self._send(bucket, torch.cat([self._local(key).reshape(-1) for key in split]))
            return None
        pieces = self._receive(bucket, sum(self._tensors[key].numel() for key in split)) if split else {}
        shards: list[list[Tensor]] = []
        offset = 0
        for key, is_split in zip(bucket.keys, bucket.split, strict=True):
            own = self._local(key)
            if not is_split:
                shards.append([own])
                continue
            parts = {peer: piece[offset : offset + own.numel()].view(own.shape) for peer, piece in pieces.items()}
            parts[rank] = own
            shards.append([parts[member] for member in bucket.group])
            offset += own.numel()
        return GatheredBucket(bucket, self.mapping, shards)

    def tensor_dtype(self, key: str) -> torch.dtype:
        """In which dtype the tensors of `key` are sent."""
        return torch.float32 if self.mapping[key].buffer else self.dtype

    def _local(self, key: str) -> Tensor:
        return self._tensors[key].detach().to(self.tensor_dtype(key))

    def _send(self, bucket: Bucket, flat: Tensor) -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, flat, bucket.publisher, self._group(bucket))])
        what = f"the publisher, rank {bucket.publisher}, did not take the shards of rank {self.layout.rank}"
        for work in works:
            self._wait(work, bucket, what)

    def _receive(self, bucket: Bucket, numel: int) -> dict[int, Tensor]:
        peers = [member for member in bucket.group if member != bucket.publisher]
        pieces = {peer: torch.empty(numel, dtype=self.dtype, device=self.layout.device) for peer in peers}
        group = self._group(bucket)
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, piece, peer, group) for peer, piece in pieces.items()])
        # NCCL answers with one piece of work for the whole batch.
        names = [f"rank {peer}" for peer in peers] if len(works) == len(peers) else [f"one of ranks {peers}"]
        for name, work in zip(names, works, strict=True):
            self._wait(work, bucket, f"{name} did not send its shards to rank {bucket.publisher}")
        return pieces

    def _group(self, bucket: Bucket) -> dist.ProcessGroup:
        if bucket.kind == "expert":
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def _wait(self, work: dist.Work, bucket: Bucket, what: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise WeightSyncError(
                f"rank {self.layout.rank}: gather of turn {bucket.turn} ({bucket.keys[0]} and {len(bucket.keys) - 1} more): "
                f"{what} within {self._timeout.total_seconds():.0f} s: {error}"
            ) from error


def collect_on_rank_zero(weights: ShardedWeights) -> Iterator[NamedTensor]:
    """Bring all tensors to global rank 0, bucket by bucket; other ranks yield nothing.

    All ranks of the job must run the iterator to its end.
    """
    layout = weights.layout
    for bucket in weights.plan.buckets:
        gathered = weights.gather(bucket)
        if layout.rank == 0 == bucket.publisher:
            assert gathered is not None
            yield from gathered.merge()
        elif gathered is not None:
            for _, tensor in gathered.merge():
                dist.send(tensor, dst=0)
        elif layout.rank == 0:
            for key in bucket.keys:
                entry = weights.mapping[key]
                for name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
                    tensor = torch.empty(shape, dtype=weights.tensor_dtype(key), device=layout.device)
                    dist.recv(tensor, src=bucket.publisher)
                    yield name, tensor
