"""Megatron's `torch_dist` checkpoint format on disk: reading it, region by region.

A folder that `megatron.core.dist_checkpointing.save` (0.16) wrote holds `metadata.json` (names the format), `common.pt`
(what is not sharded; not read here), `.metadata` (a pickled `torch.distributed.checkpoint` Metadata) and `*.distcp`
files. A sharded tensor has a key, a global shape and pieces: boxes that cover it, each a record of its own in a
`.distcp` file. A record is a whole `torch.save` archive: an uncompressed zip with a small pickle (dtype, shape, strides)
and the raw data. Objects that are not tensors have records too, under the key `<name>/shard_<offsets>_<shape>`.

Pickles are read without running anything they name: what is not on a short list becomes an inert placeholder.
`torch_dist_writer` writes the format.
"""

from __future__ import annotations

import collections
import io
import json
import math
import mmap
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata

from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.mapped_files import MappedFiles

CONFIG_FILE = "metadata.json"
INDEX_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND = "torch_dist"

Box = tuple[int, ...]

# torch.save names the class of an untyped storage's elements.
STORAGE_DTYPES = {
    "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16, "DoubleStorage": torch.float64,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: where in the tensor it lies, and the record that holds it."""

    offsets: Box
    sizes: Box
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, with its global shape."""

    key: str
    shape: Box
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def is_torch_dist(folder: Path) -> bool:
    """Whether the folder says that it is a Megatron distributed checkpoint, of whatever kind."""
    return (folder / CONFIG_FILE).is_file() and (folder / INDEX_FILE).is_file()


class TorchDistReader:
    """The tensors of a folder. Opening reads the index only and checks that every file is long enough for its records.

    Attributes:
        tensors: by key.
        objects: keys of what is not a tensor.

    Raises:
        CheckpointError: not such a folder, another format, a corrupt index, a missing or truncated file.
    """

    def __init__(self, folder: Path | str, files: MappedFiles) -> None:
        self.folder = Path(folder)
        self._files = files
        _check_backend(self.folder)
        index = _read_index(self.folder / INDEX_FILE)
        self.tensors, self.objects = _stored(self.folder, index)
        _check_lengths(self.tensors)

    def read(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the box `[offsets, offsets + sizes)` of a tensor: a view of the file where one piece holds it all.

        Raises:
            CheckpointError: the pieces do not cover the box, or a record is corrupt.
        """
        stored = self.tensors[key]
        found = []
        for piece in stored.pieces:
            low = [max(a, b) for a, b in zip(piece.offsets, offsets, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                found.append((piece, low, high))
        covered = sum(math.prod(b - a for a, b in zip(low, high, strict=True)) for _, low, high in found)
        if covered != math.prod(sizes):
            raise CheckpointError(
                f"{self.folder}: {key}: its pieces hold {covered} of the {math.prod(sizes)} elements from {list(offsets)} on; "
                "the checkpoint is not complete"
            )
        parts = [(low, _narrowed(self._record(stored, piece), piece.offsets, low, high)) for piece, low, high in found]
        if len(parts) == 1:
            return parts[0][1]
        whole = torch.empty(tuple(sizes), dtype=stored.dtype)
        for low, part in parts:
            _narrowed(whole, offsets, low, [a + n for a, n in zip(low, part.shape, strict=True)]).copy_(part)
        return whole

    def _record(self, stored: StoredTensor, piece: Piece) -> Tensor:
        """The tensor of a record, a view of the file."""
        where = f"{piece.file}: the record of {stored.key} at byte {piece.start}"
        mapped = self._files.map(piece.file)
        try:
            with zipfile.ZipFile(_Section(mapped, piece.start, piece.length)) as archive:
                root = archive.namelist()[0].split("/")[0]
                if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
                    raise CheckpointError(f"{where} was written on a big-endian machine")
                layout = _Unpickler(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
                if not isinstance(layout, _Layout):
                    raise CheckpointError(f"{where} holds no tensor")
                info = archive.getinfo(f"{root}/data/{layout.storage.key}")
        except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, IndexError, EOFError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{where} is corrupt: {type(error).__name__}: {error}") from error
        if layout.sizes != piece.sizes:
            raise CheckpointError(f"{where} has shape {layout.sizes}, the index says {piece.sizes}")
        last = layout.offset + sum((n - 1) * step for n, step in zip(layout.sizes, layout.strides, strict=True))
        if last >= layout.storage.elements or info.file_size < layout.storage.elements * layout.storage.dtype.itemsize:
            raise CheckpointError(f"{where} is corrupt: {info.file_size} bytes do not hold shape {layout.sizes}")
        header = piece.start + info.header_offset
        name, extra = struct.unpack("<HH", mapped[header + 26 : header + 30])
        data = self._files.tensor(
            piece.file, header + 30 + name + extra, (layout.storage.elements,), layout.storage.dtype
        )
        return data.as_strided(layout.sizes, layout.strides, layout.offset)


def _narrowed(tensor: Tensor, origin: Sequence[int], low: Sequence[int], high: Sequence[int]) -> Tensor:
    for dim, (zero, a, b) in enumerate(zip(origin, low, high, strict=True)):
        tensor = tensor.narrow(dim, a - zero, b - a)
    return tensor


def _check_backend(folder: Path) -> None:
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a Megatron checkpoint folder")
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: not found; {folder} is not a checkpoint of megatron.core.dist_checkpointing, or its save was interrupted"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not the description of a distributed checkpoint: {error}") from error
    if backend != BACKEND:
        raise CheckpointError(f"{path}: format {backend!r} is not supported, only {BACKEND!r}; save with that strategy")


def _read_index(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found; the checkpoint is incomplete") from error
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: corrupt index: {type(error).__name__}: {error}") from error
    if not isinstance(index, dcp_metadata.Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{path}: not an index of torch.distributed.checkpoint")
    return index


def _stored(folder: Path, index: Any) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    tensors: dict[str, StoredTensor] = {}
    objects = []
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            objects.append(key)
            continue
        pieces = []
        for chunk in entry.chunks:
            record = index.storage_data.get(dcp_metadata.MetadataIndex(key, chunk.offsets))
            if record is None:
                raise CheckpointError(f"{folder / INDEX_FILE}: {key}: no record for the piece at {list(chunk.offsets)}")
            if Path(record.relative_path).name != record.relative_path:
                raise CheckpointError(f"{folder / INDEX_FILE}: {key}: {record.relative_path!r} is no file name")
            if getattr(record, "transform_descriptors", None):
                raise CheckpointError(
                    f"{folder / INDEX_FILE}: {key} is stored with {record.transform_descriptors}, which is not supported"
                )
            pieces.append(
                Piece(
                    tuple(chunk.offsets),
                    tuple(chunk.sizes),
                    folder / record.relative_path,
                    record.offset,
                    record.length,
                )
            )
        tensors[key] = StoredTensor(key, tuple(entry.size), entry.properties.dtype, tuple(pieces))
    return tensors, tuple(objects)


def _check_lengths(tensors: dict[str, StoredTensor]) -> None:
    ends: dict[Path, tuple[int, str]] = {}
    for stored in tensors.values():
        for piece in stored.pieces:
            ends[piece.file] = max(ends.get(piece.file, (0, "")), (piece.start + piece.length, stored.key))
    for file, (end, key) in ends.items():
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though the index says that it holds {key}; copy the folder again")
        size = file.stat().st_size
        if size < end:
            raise CheckpointError(
                f"{file}: truncated: {size} bytes, but {key} ends at byte {end}; copy the folder again"
            )


class _Section(io.RawIOBase):
    """A part of a mapped file as a seekable file."""

    def __init__(self, mapped: mmap.mmap, start: int, length: int) -> None:
        self._mapped, self._start, self._length, self._position = mapped, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")  # what zipfile expects of a file that is too short
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._length if size < 0 else min(self._position + size, self._length)
        data = self._mapped[self._start + self._position : self._start + end]
        self._position += len(data)
        return data


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True)
class _Layout:
    storage: _Storage
    offset: int
    sizes: Box
    strides: Box


def _tensor_layout(storage: Any, offset: int, sizes: Any, strides: Any, *_: Any) -> _Layout:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _Layout(storage, offset, tuple(sizes), tuple(strides))


def _parameter_layout(data: Any, *_: Any) -> Any:
    return data


class _Inert:
    """Stands for whatever a pickle names that this reader does not need."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_layout,
    ("torch._utils", "_rebuild_parameter"): _parameter_layout,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): dcp_filesystem._StorageInfo,
}
_KNOWN |= {
    (dcp_metadata.__name__, name): getattr(dcp_metadata, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _Inert

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, elements = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"storage of an unsupported type: {pid!r}")
        return _Storage(str(key), dtype, int(elements))
