"""Tensors as views of mapped files, without the files' pages piling up in this process.

A page that was read stays resident until its mapping forgets it, so a converter that walks a model through plain mmap
ends up as large as the model. `MappedFiles.drop` forgets them all; views stay valid and read again from the page cache.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.errors import CheckpointError

# A private mapping may be viewed as a writable tensor without a warning; writes never reach the file. NORESERVE, or
# the kernel would refuse to map a file that is larger than the memory.
_FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAX_OPEN = 16


class MappedFiles:
    """Keeps the most recently used files mapped."""

    def __init__(self) -> None:
        self._maps: OrderedDict[Path, mmap.mmap] = OrderedDict()

    def map(self, path: Path) -> mmap.mmap:
        """Return the mapping of the whole file.

        Raises:
            CheckpointError: the file is missing, empty or unreadable.
        """
        if path in self._maps:
            self._maps.move_to_end(path)
            return self._maps[path]
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                mapped = mmap.mmap(descriptor, 0, flags=_FLAGS, prot=_PROTECTION)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self._maps[path] = mapped
        if len(self._maps) > _MAX_OPEN:
            self._maps.popitem(last=False)  # unmapped when its last view is gone
        return mapped

    def tensor(self, path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor whose data begin at byte `start`: a view of the file. Do not write into it.

        Raises:
            CheckpointError: the file is unreadable or ends before the tensor does.
        """
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        mapped = self.map(path)
        if start + size > len(mapped):
            raise CheckpointError(f"{path}: truncated: {len(mapped)} bytes, but a tensor ends at byte {start + size}")
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start)
        if start % dtype.itemsize:
            data = data.clone()  # not every processor reads numbers at odd addresses
        return data.view(dtype).view(shape)

    def drop(self) -> None:
        """Give the pages of all files back."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._maps.clear()
