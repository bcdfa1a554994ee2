"""Tensors as a stream of bytes: cast, checksummed and written a few megabytes at a time."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_convert.errors import CheckpointError

CHUNK_BYTES = 4 << 20

# Computes a chunk's checksum while the chunk is being written: the two take about as long.
_checksums = ThreadPoolExecutor(1, thread_name_prefix="checksum")

_SMALL_BYTES = 1 << 18  # handing over less is slower than doing it

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the system allows",
}

# Called with the number of bytes written since the last call.
OnBytes = Callable[[int], None]


def chunks(tensor: Tensor, dtype: torch.dtype, name: str) -> Iterator[memoryview]:
    """Yield the tensor's bytes, as `dtype`, row-major.

    Raises:
        CheckpointError: a finite number is infinite in `dtype`; the message says `name`.
    """
    flat = tensor.contiguous().view(-1)
    elements = max(CHUNK_BYTES // dtype.itemsize, 1)
    for start in range(0, flat.numel(), elements):
        part = flat[start : start + elements]
        if part.dtype != dtype:
            cast = part.to(dtype)
            if dtype == torch.float16 and bool((cast.isinf() & part.isfinite()).any()):
                raise CheckpointError(f"{name}: has numbers that float16 cannot hold; use bfloat16 or float32")
            part = cast
        array: Any = part.view(torch.uint8).numpy()
        yield memoryview(array)


def write_stream(
    write: Callable[[memoryview], object], tensor: Tensor, dtype: torch.dtype, name: str, on_bytes: OnBytes
) -> int:
    """Write a tensor with `write`; return the CRC-32 of its bytes."""
    checksum: int = 0
    for data in chunks(tensor, dtype, name):
        if len(data) < _SMALL_BYTES:
            write(data)
            checksum = zlib.crc32(data, checksum)
        else:
            computed: Future[int] = _checksums.submit(zlib.crc32, data, checksum)
            try:
                write(data)
            finally:
                checksum = computed.result()
        on_bytes(len(data))
    return checksum


@contextmanager
def naming_write_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an operating system error while writing `what` to `path` into one that says so.

    Raises:
        CheckpointError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        reason = _FULL.get(error.errno or 0)
        advice = "; make room, then run the command again" if reason else ""
        raise CheckpointError(f"{path}: cannot write {what}: {reason or error}{advice}") from error
