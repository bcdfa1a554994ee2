"""Writing one safetensors file as a stream: the header first, for which names, shapes and dtypes are enough."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from checkpoint_convert.byte_stream import OnBytes, chunks, naming_write_errors, write_stream
from checkpoint_convert.hf import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """A file in the making; tensors must be added in the order of `tensors`."""

    def __init__(self, path: Path, file: BinaryIO, tensors: Sequence[TensorPlan]) -> None:
        self.path = path
        self._file = file
        self._next = iter(tensors)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in tensors:
            header[tensor.name] = {
                "dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (end, end + tensor.size),
            }  # fmt: skip
            end += tensor.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begin aligned
        with naming_write_errors(path, "the header"):
            self._write(memoryview(len(text).to_bytes(8, "little") + text))

    def add(self, tensor: Tensor, on_bytes: OnBytes) -> tuple[int, int]:
        """Append the next tensor, cast to its planned dtype; return where its data begin and their CRC-32.

        Raises:
            CheckpointError: the disk is full, or the cast overflows.
        """
        plan = self._take(tensor)
        with naming_write_errors(self.path, plan.name):
            start = self._file.tell()
            return start, write_stream(self._write, tensor, plan.dtype, plan.name, on_bytes)

    def append(self, tensor: Tensor) -> None:
        """As `add`, where nobody needs the checksum."""
        plan = self._take(tensor)
        with naming_write_errors(self.path, plan.name):
            for data in chunks(tensor, plan.dtype, plan.name):
                self._write(data)

    def _take(self, tensor: Tensor) -> TensorPlan:
        plan = next(self._next)
        if tuple(tensor.shape) != plan.shape:
            raise ValueError(f"{plan.name} has shape {tuple(tensor.shape)}, planned was {plan.shape}")
        return plan

    def _write(self, data: memoryview) -> None:
        written = 0
        while written < len(data):
            written += self._file.write(data[written:])
