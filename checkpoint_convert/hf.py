"""Hugging Face model folders: lazy reading of safetensors, atomic writing.

Only safetensors are read (a pickle can run code). The writer is in `export`.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint_convert.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# safetensors' names; the first three are the dtypes that weights may have.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies, from the file's header. `dtype` is safetensors' name (`BF16`), `start` its first byte in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int


class HFReader:
    """The tensors of a HF folder, by name. Opening reads the headers only; `tensor` maps the file lazily.

    Opening checks that the index and the files agree and that every file is as long as its header says.

    Raises:
        CheckpointError: no weights, a missing, truncated or corrupt file, or an index that disagrees with the files;
            the message names file and tensor.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self.dir = Path(model_dir)
        self._handles: dict[Path, Any] = {}
        self._tensors = _open_folder(self.dir)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Header entry of `name`.

        Raises:
            CheckpointError: there is no such tensor.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.dir}: tensor {name} is missing") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def tensor(self, name: str) -> Tensor:
        """Return the tensor on the CPU, in the file's dtype. It may be a view of the mapped file: copy, do not write into it.

        Raises:
            CheckpointError: there is no such tensor, it cannot be read, or its dtype is not a plain float.
        """
        info = self.info(name)
        if info.dtype not in DTYPES:
            raise CheckpointError(
                f"{info.file}: {name} has dtype {info.dtype}; only {', '.join(DTYPES)} weights are supported"
            )
        try:
            if info.file not in self._handles:
                self._handles[info.file] = safe_open(info.file, framework="pt", device="cpu")
            tensor: Tensor = self._handles[info.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: cannot read {name}: {error}") from error
        return tensor

    def close(self) -> None:
        self._handles.clear()

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_folder(model_dir: Path) -> dict[str, TensorInfo]:
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: no such folder; give a Hugging Face model folder")
    index = model_dir / INDEX_FILE
    if index.is_file():
        return _open_indexed(index)
    single = model_dir / SINGLE_FILE
    if single.is_file():
        return _read_header(single, expected=None)
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in model_dir.glob(pattern))
    found = f"; {', '.join(others[:3])} cannot be used, convert to safetensors" if others else ""
    raise CheckpointError(f"{model_dir}: neither {INDEX_FILE} nor {SINGLE_FILE} found{found}")


def _open_indexed(index: Path) -> dict[str, TensorInfo]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        expected: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index}: {name} is said to be in {file!r}, which is no file name")
            expected.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from error
    tensors: dict[str, TensorInfo] = {}
    for file, names in sorted(expected.items()):
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(
                f"{path}: missing, though {index.name} says that it holds {names[0]} and {len(names) - 1} more tensors"
            )
        header = _read_header(path, expected=names)
        absent = [name for name in names if name not in header]
        if absent:
            raise CheckpointError(
                f"{path}: tensor {absent[0]} is missing ({len(absent)} in all), though {index.name} says that it is there"
            )
        extra = sorted(set(header) - set(names))
        if extra:
            raise CheckpointError(
                f"{path}: tensor {extra[0]} ({len(extra)} in all) is not listed for this file in {index.name}"
            )
        tensors |= header
    # The order of the index, which is the model's.
    return {name: tensors[name] for name in weight_map}


def _read_header(path: Path, expected: list[str] | None) -> dict[str, TensorInfo]:
    """Parse and check a safetensors header: 8 bytes of little-endian length, JSON, then the data.

    Args:
        expected: tensors that should be in the file, to name one when the header itself is unreadable.
    """
    size = path.stat().st_size
    at_stake = f" (it should hold {expected[0]})" if expected else ""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: not a safetensors file{at_stake}: {size} bytes, header length {length}; fetch the file again"
            )
        if size < 8 + length:
            raise CheckpointError(
                f"{path}: truncated within its header{at_stake}: {size} of at least {8 + length} bytes; fetch the file again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ranges = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in entries.items()
        }
        tensors = {
            name: TensorInfo(
                path, tuple(int(size) for size in entry["shape"]), entry["dtype"], 8 + length + ranges[name][0]
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: corrupt header{at_stake}: {type(error).__name__}: {error}; fetch the file again"
        ) from error
    data = size - 8 - length
    cut = sorted((end, name) for name, (_, end) in ranges.items() if end > data)
    if cut:
        raise CheckpointError(
            f"{path}: truncated: tensor {cut[0][1]} ends at data byte {cut[0][0]}, but the file holds {data} "
            f"({len(cut)} of {len(ranges)} tensors are cut off); fetch the file again"
        )
    if ranges and max(end for _, end in ranges.values()) != data:
        raise CheckpointError(
            f"{path}: corrupt: {data} data bytes, but the last tensor ends at {max(end for _, end in ranges.values())}; fetch the file again"
        )
    for name, info in tensors.items():
        begin, end = ranges[name]
        needed = math.prod(info.shape) * _ELEMENT_BYTES.get(info.dtype, 0)
        if begin < 0 or (info.dtype in _ELEMENT_BYTES and end - begin != needed):
            raise CheckpointError(
                f"{path}: corrupt header: {name} of {info.dtype} {info.shape} takes {end - begin} bytes instead of {needed}"
            )
    return tensors
