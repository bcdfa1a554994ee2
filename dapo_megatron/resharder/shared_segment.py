"""Memory that a publisher shares with the engines of its host: two slots, so that one is written while the other is read.

On the host a segment is a file of `/dev/shm` with a name of its own, which its owner keeps locked. A lock ends with its process, so
a segment that can be locked belongs to a run that is gone, however it went, and in whatever process namespace it was.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dapo_megatron.platform.cuda_ipc import share
from dapo_megatron.resharder.transport import WeightSyncError
from rollout_service.engine import EngineEndpoint
from rollout_service.weight_loader import (
    CUDA_IPC_FORMAT,
    SEGMENT_PREFIX,
    SHARED_MEMORY,
    SHARED_MEMORY_FORMAT,
)

logger = logging.getLogger(__name__)

SLOTS = 2


def clear_stale_segments(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove the segments of runs that are gone; returns their names."""
    removed = []
    for path in sorted(folder.glob(f"{SEGMENT_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            logger.debug("%s is not ours to look at: %s", path, error)  # another user's, or removed meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
        except BlockingIOError:
            pass  # its owner lives
        except FileNotFoundError:
            pass  # another rank was faster
        finally:
            os.close(descriptor)
    return removed


class HostSlots:
    """Slots in a file of `/dev/shm`, for engines whose memory is that of this host.

    Args:
        slot_bytes: the largest bucket, `weight_loader.room` of its tensors.

    Raises:
        WeightSyncError: there is not enough room.
    """

    load_format = SHARED_MEMORY_FORMAT

    def __init__(self, rank: int, slot_bytes: int, folder: Path = SHARED_MEMORY) -> None:
        self._slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        total = SLOTS * self._slot_bytes
        self.path, self._descriptor = _locked_file(folder, rank)
        try:
            # Reserved now: a page that is missing later would end the process with a bus error.
            os.posix_fallocate(self._descriptor, 0, total)
        except OSError as error:
            self._remove()
            if error.errno not in (errno.ENOSPC, errno.EFBIG):
                raise
            status = os.statvfs(folder)
            raise WeightSyncError(
                f"rank {rank}: {folder} has {status.f_bavail * status.f_frsize / 2**20:.0f} MiB free, "
                f"{SLOTS} buckets need {total / 2**20:.0f} MiB: lower weight_sync.bucket_mb or give the container more (--shm-size)"
            ) from error
        self._memory = torch.frombuffer(mmap.mmap(self._descriptor, total), dtype=torch.uint8)

    def slot(self, index: int) -> Tensor:
        """The bytes of a slot."""
        return self._memory[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def sources(self, engines: Sequence[EngineEndpoint]) -> dict[int, tuple[str, ...]]:
        """For each engine id, what `WeightsClient.receive` names as the source of each slot."""
        places = tuple(f"{self.path.name}:{index * self._slot_bytes}" for index in range(SLOTS))
        return {engine.engine_id: places for engine in engines}

    def close(self) -> None:
        """Remove the name. The memory lives until the engines let go of it, at their next update at the latest."""
        if self._descriptor >= 0:
            self._remove()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def _locked_file(folder: Path, rank: int) -> tuple[Path, int]:
    """A new empty file that this process alone has locked."""
    while True:
        path = folder / f"{SEGMENT_PREFIX}{uuid.uuid4().hex}-r{rank}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        os.close(descriptor)  # another run took it for a stale one before it was locked


class DeviceSlots:
    """Slots in this rank's GPU memory, which colocated engines open through CUDA IPC.

    Every tensor-parallel rank of every engine gets a handle of its own, which it opens once.
    """

    load_format = CUDA_IPC_FORMAT

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._sources: dict[EngineEndpoint, tuple[str, ...]] = {}

    def slot(self, index: int) -> Tensor:
        return self._slots[index]

    def sources(self, engines: Sequence[EngineEndpoint]) -> dict[int, tuple[str, ...]]:
        for engine in engines:
            if engine not in self._sources:  # new, or restarted at another port
                handles = ([share(slot) for _ in range(engine.tp_size)] for slot in self._slots)
                self._sources[engine] = tuple(json.dumps(each) for each in handles)
        return {engine.engine_id: self._sources[engine] for engine in engines}

    def close(self) -> None:
        self._slots = []


Slots = HostSlots | DeviceSlots
