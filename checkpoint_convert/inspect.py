"""What is in a checkpoint of either format: a table of tensors, shapes, dtypes and where they lie."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint_convert.hf import DTYPES, HFReader
from checkpoint_convert.mapped_files import MappedFiles
from checkpoint_convert.megatron import model_keys
from checkpoint_convert.sources import MODEL_FOLDER
from checkpoint_convert.torch_dist import CONFIG_FILE, StoredTensor, TorchDistReader

_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Row:
    """One tensor, or several alike in everything but layer or expert number.

    Attributes:
        name: with `{first..last}` for numbers that were folded.
        pieces: how the tensor is cut along each dimension, for example `1 x 2`; 1 if it is whole.
        size: bytes of all of them.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    pieces: str
    size: int
    parameters: int


@dataclass(frozen=True)
class Contents:
    """What `inspect` shows.

    Attributes:
        layout: the format and how it is laid out, in words.
        others: tensors and objects that are not the model's (of a Megatron checkpoint).
    """

    folder: Path
    layout: str
    rows: list[Row]
    others: int


def contents(folder: Path, fold: bool = True) -> Contents:
    """Read the headers of a checkpoint; no config.json is needed.

    Args:
        fold: one row for tensors that differ in their numbers only.

    Raises:
        CheckpointError: not a checkpoint, or a file is missing, truncated or corrupt.
    """
    for place in (folder, folder / MODEL_FOLDER):
        if (place / CONFIG_FILE).is_file():
            return _megatron(place, fold)
    with HFReader(folder) as reader:
        infos = {name: reader.info(name) for name in reader.names}
    rows = [
        _row(name, info.shape, str(DTYPES.get(info.dtype, info.dtype)).removeprefix("torch."), "1")
        for name, info in infos.items()
    ]
    files = len({info.file for info in infos.values()})
    layout = f"Hugging Face, {files} safetensors file{'s' if files > 1 else ''}"
    return Contents(folder, layout, _folded(rows) if fold else rows, 0)


def _megatron(folder: Path, fold: bool) -> Contents:
    reader = TorchDistReader(folder, MappedFiles())
    keys = model_keys(reader.tensors)
    rows = [
        _row(key, stored.shape, str(stored.dtype).removeprefix("torch."), _grid(stored))
        for key, stored in ((key, reader.tensors[key]) for key in keys)
    ]
    numbered = any(".layers." in key and _NUMBER.search(key) for key in keys)
    files = len({piece.file for key in keys for piece in reader.tensors[key].pieces})
    layers = "one tensor per layer" if numbered else "layers stacked along the first dimension"
    layout = f"Megatron torch_dist, {files} file{'s' if files > 1 else ''}, {layers}"
    others = len(reader.tensors) - len(keys) + len(reader.objects)
    return Contents(folder, layout, _folded(rows) if fold else rows, others)


def _grid(stored: StoredTensor) -> str:
    cuts = [len({piece.offsets[dim] for piece in stored.pieces}) for dim in range(len(stored.shape))]
    return " x ".join(map(str, cuts)) if max(cuts, default=1) > 1 else "1"


def _row(name: str, shape: tuple[int, ...], dtype: str, pieces: str) -> Row:
    parameters = torch.Size(shape).numel()
    known = getattr(torch, dtype, None)
    itemsize = known.itemsize if isinstance(known, torch.dtype) else 1
    return Row(name, 1, shape, dtype, pieces, parameters * itemsize, parameters)


def _folded(rows: Iterable[Row]) -> list[Row]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        pattern = _NUMBER.sub(".{}.", row.name)
        groups.setdefault((pattern, row.shape, row.dtype, row.pieces), []).append(row)
    return [_merged(alike) for alike in groups.values()]


def _merged(alike: list[Row]) -> Row:
    first = alike[0]
    if len(alike) == 1:
        return first
    numbers = zip(*(map(int, _NUMBER.findall(row.name)) for row in alike), strict=True)
    ranges = iter([f".{{{min(seen)}..{max(seen)}}}." if len(set(seen)) > 1 else f".{seen[0]}." for seen in numbers])
    return Row(
        _NUMBER.sub(lambda _: next(ranges), first.name),
        len(alike),
        first.shape,
        first.dtype,
        first.pieces,
        sum(row.size for row in alike),
        sum(row.parameters for row in alike),
    )
