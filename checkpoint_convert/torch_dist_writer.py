"""Writing Megatron's `torch_dist` format tensor by tensor (see `torch_dist` for what it is).

`torch.distributed.checkpoint` plans a whole state dict and copies it; here a record is streamed from wherever the tensor
lies, so memory does not grow with the model. One record may be listed under several keys.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint_convert.byte_stream import OnBytes, naming_write_errors, write_stream
from checkpoint_convert.torch_dist import BACKEND, COMMON_FILE, CONFIG_FILE, INDEX_FILE, STORAGE_DTYPES, Box

_ROOT = "archive"
_ALIGNMENT = 64
# Of a local file header: fixed part, and the extra field of large files.
_HEADER_BYTES, _ZIP64_BYTES = 30, 20
_ZIP64_FROM = 1 << 30  # zipfile itself would switch a little below 2 GiB, when asked to guess
_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


@dataclass(frozen=True)
class Record:
    """A record in a `.distcp` file.

    Attributes:
        start, length: the record.
        data, size: the raw tensor data in it.
        checksum: CRC-32 of the data, which the archive holds too.
    """

    start: int
    length: int
    data: int
    size: int
    checksum: int


@dataclass(frozen=True)
class PlacedRecord:
    """A record, and one of the tensors that it is a piece of."""

    key: str
    shape: Box
    offsets: Box
    sizes: Box
    dtype: torch.dtype
    file: str
    start: int
    length: int


class DistFile:
    """A `.distcp` file in the making. `add` appends a record."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file

    def add(self, tensor: Tensor, sizes: Sequence[int], dtype: torch.dtype, name: str, on_bytes: OnBytes) -> Record:
        """Append `tensor`, cast to `dtype`, as a tensor of shape `sizes` (the same elements).

        Raises:
            CheckpointError: the disk is full, or the cast overflows; the message says `name`.
        """
        size = math.prod(sizes) * dtype.itemsize
        with naming_write_errors(self.path, name):
            start = self._file.tell()
            appended: Any = _Appended(self._file, start)
            with zipfile.ZipFile(appended, "w") as archive:  # uncompressed
                archive.writestr(zipfile.ZipInfo(f"{_ROOT}/data.pkl"), _pickled_layout(sizes, dtype))
                archive.writestr(zipfile.ZipInfo(f"{_ROOT}/byteorder"), b"little")
                archive.writestr(zipfile.ZipInfo(f"{_ROOT}/version"), b"3\n")
                entry = zipfile.ZipInfo(f"{_ROOT}/data/0")
                large = size >= _ZIP64_FROM
                entry.header_offset = appended.tell()
                header = self._file.tell() + _HEADER_BYTES + len(entry.filename) + (_ZIP64_BYTES if large else 0)
                entry.extra = _padding(header)
                entry.file_size = entry.compress_size = size
                entry.CRC = 0
                # ZipFile.open computes the checksum between writes; here it is computed meanwhile, and noted afterwards.
                appended.write(entry.FileHeader(zip64=large))
                data = self._file.tell()
                checksum = entry.CRC = write_stream(appended.write, tensor, dtype, name, on_bytes)
                appended.seek(entry.header_offset)
                appended.write(entry.FileHeader(zip64=large))
                appended.seek(0, os.SEEK_END)
                archive.filelist.append(entry)
                archive.start_dir = appended.tell()  # where the directory of the archive goes
            return Record(start, self._file.tell() - start, data, size, checksum)


def write_index(folder: Path, records: Iterable[PlacedRecord], objects: Iterable[str]) -> None:
    """Write what makes the folder a checkpoint; `metadata.json`, by which Megatron knows one, comes last.

    Args:
        records: every piece of every tensor.
        objects: keys that a model asks for beside its tensors (`_extra_state`); all hold None.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    index: dict[MetadataIndex, _StorageInfo] = {}
    for record in records:
        entry = tensors.setdefault(
            record.key, TensorStorageMetadata(TensorProperties(dtype=record.dtype), torch.Size(record.shape), [])
        )
        offsets = torch.Size(record.offsets)
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(record.sizes)))
        index[MetadataIndex(record.key, offsets)] = _StorageInfo(record.file, record.start, record.length)
    nothing = io.BytesIO()
    torch.save([None], nothing)  # Megatron saves a list, one entry for each local shard
    objects_file = "__0_objects.distcp"
    entries: dict[str, Any] = dict(tensors)
    for key in objects:
        entries[key] = BytesStorageMetadata()
        index[MetadataIndex(key)] = _StorageInfo(objects_file, 0, len(nothing.getvalue()))
    common = io.BytesIO()
    torch.save({}, common)
    config = {
        "sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1,
    }  # fmt: skip
    files = {
        objects_file: nothing.getvalue(),
        COMMON_FILE: common.getvalue(),
        INDEX_FILE: pickle.dumps(Metadata(state_dict_metadata=entries, storage_data=index)),
        CONFIG_FILE: json.dumps(config).encode(),
    }
    for name, content in files.items():
        with naming_write_errors(folder / name, "the index"):
            (folder / name).write_bytes(content)


class _Appended:
    """What is written from `start` on, as a file of its own: zip offsets count from there."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file, self._start = file, start

    def write(self, data: Any, /) -> int:
        # The file is unbuffered, so that large data are not copied; a write may then be partial.
        view = memoryview(data)
        written = 0
        while written < len(view):
            written += self._file.write(view[written:])
        return written

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset + self._start if whence == os.SEEK_SET else offset, whence) - self._start

    def flush(self) -> None:
        self._file.flush()


def _padding(header: int) -> bytes:
    """A zip extra field after which the data begin at a multiple of 64 bytes, as torch.save aligns them."""
    length = -(header + 4) % _ALIGNMENT
    return struct.pack("<HH", 0x4246, length) + b"Z" * length


class _Storage:
    """Marks the place of the storage in a pickled tensor."""


class _Pickled:
    """Pickles as a tensor of torch.save."""

    def __init__(self, sizes: Box) -> None:
        self.sizes = sizes

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes)))
        return torch._utils._rebuild_tensor_v2, (_Storage(), 0, self.sizes, strides, False, OrderedDict())


def _pickled_layout(sizes: Sequence[int], dtype: torch.dtype) -> bytes:
    buffer = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, _Storage):
                return ("storage", getattr(torch, _STORAGES[dtype]), "0", "cpu", math.prod(sizes))
            return None

    Pickler(buffer, protocol=2).dump(_Pickled(tuple(sizes)))
    return buffer.getvalue()
