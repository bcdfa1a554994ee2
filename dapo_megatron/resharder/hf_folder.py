"""The trainer's weights as a Hugging Face folder, written by all publishers of the transfer plan in parallel.

Each publisher writes shard files of its own straight from its gathered buckets: while one bucket is being written the next
is gathered. Rank 0 adds index, config.json and tokenizer files and gives the folder its name when all are through.

    rank 0      gather 0 | write 0 ... | write 2 ...            | index, config, rename
                         | gather 2    |
    rank 1      gather 1 | write 1 ......... | write 3 ... | waits

That needs a folder that all publishers see. Where one does not, rank 0 collects the tensors and writes all of them.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.export import (
    DEFAULT_SHARD_BYTES,
    ExportFolder,
    ShardFile,
    ShardWriter,
    incomplete_folder,
    plan_shards,
    tensor_plans,
)
from dapo_megatron.resharder.gather import NamedTensor, ShardedWeights, collect_on_rank_zero
from dapo_megatron.resharder.transport import WeightSyncError

logger = logging.getLogger(__name__)

_APPEARS_S = 5.0  # a network file system may show a new file a little later on other hosts
_POLL_S = 0.05


class HFFolderExport:
    """Writes the model as a Hugging Face folder, any number of times; all ranks create and call it together.

    Args:
        source: folder with the config and tokenizer to copy.
        dtype: of the files' parameters; the router's selection bias stays float32.
        durable: wait until everything is on disk, so that a finished folder survives a crash of the machine.
        max_shard_bytes: of tensors in one file; a larger tensor has a file of its own.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        *,
        source: Path,
        dtype: torch.dtype,
        durable: bool,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self._weights = weights
        self._rank = weights.layout.rank
        self._source = source
        self._dtype = dtype
        self._durable = durable
        self._max_shard_bytes = max_shard_bytes
        self._shared: bool | None = None  # whether all publishers see the folder; asked once

    def write(self, target: Path) -> int:
        """Write the current weights to `target`, replacing an earlier model there.

        Returns:
            Bytes of tensors in the folder, whoever wrote them.

        Raises:
            WeightSyncError: on all ranks, when one could not write; names the rank and the file. Nothing is left then.
        """
        folder: ExportFolder | None = None
        token = uuid.uuid4().hex

        def create() -> None:
            nonlocal folder
            folder = ExportFolder(target, self._source, self._dtype, self._durable)
            folder.create()
            (folder.incomplete / token).touch()

        def publish() -> None:
            assert folder is not None
            (folder.incomplete / token).unlink()
            folder.publish(parts)

        try:
            self._agree(target, _fault(create) if self._rank == 0 else None)
            if self._shared is None:
                self._shared = self._is_shared(target, token)
            parts = self._parts(self._shared)
            self._agree(target, self._write_parts(target, parts))
            self._agree(target, _fault(publish) if self._rank == 0 else None)
        except WeightSyncError:
            if folder is not None:
                folder.discard()
            raise
        return sum(file.size for part in parts for file in part)

    def _parts(self, shared: bool) -> list[tuple[ShardFile, ...]]:
        """Files by publisher, in the order of `plan.publishers`; all of them rank 0's if the folder is not shared."""
        plan = self._weights.plan
        keys: dict[int, list[str]] = {publisher: [] for publisher in plan.publishers} if shared else {0: []}
        for bucket in plan.buckets:
            keys[bucket.publisher if shared else 0] += bucket.keys
        mapping = self._weights.mapping
        return plan_shards([tensor_plans(mapping, part, self._dtype) for part in keys.values()], self._max_shard_bytes)

    def _write_parts(self, target: Path, parts: Sequence[tuple[ShardFile, ...]]) -> str | None:
        """This rank's share of gathering and writing; returns what went wrong with the writing."""
        if self._shared:
            publishers = self._weights.plan.publishers
            files = parts[publishers.index(self._rank)] if self._rank in publishers else ()
            return _write(incomplete_folder(target), files, self._buckets(), self._durable)
        collected = ([pair] for pair in collect_on_rank_zero(self._weights))
        files = parts[0] if self._rank == 0 else ()
        return _write(incomplete_folder(target), files, collected, self._durable)

    def _buckets(self) -> Iterator[list[NamedTensor]]:
        """What this rank publishes, bucket by bucket, while it takes part in gathering the others'."""
        for bucket in self._weights.plan.buckets:
            gathered = self._weights.gather(bucket)
            if gathered is not None:
                yield gathered.merge()

    def _is_shared(self, target: Path, token: str) -> bool:
        """Whether every publisher sees the file that rank 0 has just made. Collective."""
        tokens = [token]
        dist.broadcast_object_list(tokens, src=0, device=self._weights.layout.device)
        publishes = self._rank in self._weights.plan.publishers
        sees = not publishes or _appears(incomplete_folder(target) / tokens[0])
        everybody: list[tuple[bool, str]] = [(False, "")] * self._weights.layout.world_size
        dist.all_gather_object(everybody, (sees, socket.gethostname()))
        blind = [f"rank {rank} ({host})" for rank, (seen, host) in enumerate(everybody) if not seen]
        if blind and self._rank == 0:
            logger.warning(
                "%s is not shared with %s: rank 0 collects the weights and writes all of them, which is slower; "
                "put the run folder on a file system that all trainer hosts mount",
                target.parent,
                ", ".join(blind),
            )
        return not blind

    def _agree(self, target: Path, fault: str | None) -> None:
        """Raise on all ranks if one has a fault. Collective."""
        everybody: list[str | None] = [None] * self._weights.layout.world_size
        dist.all_gather_object(everybody, fault)
        faults = [f"rank {rank}: {words}" for rank, words in enumerate(everybody) if words is not None]
        if faults:
            raise WeightSyncError(f"the weights could not be written to {target}: {'; '.join(faults)}")


def write_hf_folder(weights: ShardedWeights, *, target: Path, source: Path, dtype: torch.dtype) -> int:
    """Write the whole model once, to stay; all ranks call it together. See `HFFolderExport`."""
    return HFFolderExport(weights, source=source, dtype=dtype, durable=True).write(target)


def _write(
    folder: Path, files: Sequence[ShardFile], stream: Iterable[Sequence[NamedTensor]], durable: bool
) -> str | None:
    """Write `files` from the stream; returns what went wrong.

    The stream is read to its end in any case: other ranks wait for this one to take part in their gathers.
    """
    fault: str | None = None
    pending: Future[str | None] | None = None
    with ShardWriter(folder, files, durable) as writer, ThreadPoolExecutor(1, "weights-writer") as thread:

        def add(tensors: Sequence[NamedTensor]) -> None:
            for name, tensor in tensors:
                writer.add(name, tensor)

        for tensors in stream:
            if pending is not None:
                fault, pending = pending.result(), None
            if fault is None:
                pending = thread.submit(_fault, lambda tensors=tensors: add(tensors))
        if pending is not None:
            fault = pending.result()
        if fault is None:
            writer.finish()
    return fault


def _fault(work: Callable[[], None]) -> str | None:
    """What goes wrong on the disk while `work` is done."""
    try:
        work()
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _APPEARS_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
