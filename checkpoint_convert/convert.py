"""HF folders into Megatron distributed checkpoints and back, streaming: memory holds a few tensors, never the model.

    hf_to_megatron(folder, out)                # out/: dist_checkpointing folder, out/hf/: config.json, tokenizer, ...
    megatron_to_hf(out, folder)                # also the checkpoint of a training run, at whatever layout it was saved

Both publish the whole folder at the end or nothing, and go on where an interrupted run of the same arguments ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from checkpoint_convert import job
from checkpoint_convert.byte_stream import OnBytes, naming_write_errors
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.export import (
    DEFAULT_SHARD_BYTES,
    check_replaceable,
    copy_companions,
    export_config,
    plan_shards,
    write_json,
)
from checkpoint_convert.hf import INDEX_FILE
from checkpoint_convert.mapping import ParamMapping
from checkpoint_convert.megatron import extra_state_keys, full_shape, layers_are_stacked, pieces, places
from checkpoint_convert.safetensors_file import SafetensorsFile, TensorPlan
from checkpoint_convert.sources import HF_FOLDER, Source, open_hf, open_megatron
from checkpoint_convert.torch_dist import is_torch_dist
from checkpoint_convert.torch_dist_writer import DistFile, PlacedRecord, write_index

# A `.distcp` file is a unit of work: small enough to lose and to share out, and not thousands of them.
_FILE_BYTES, _MAX_FILES = 256 << 20, 256


@dataclass(frozen=True)
class Options:
    """What both directions share.

    Attributes:
        dtype: of all tensors written, None to keep each one's. Megatron's float32 buffers keep theirs in any case.
        workers: processes.
        overwrite: replace a checkpoint that is in the way.
        durable: wait for the disk before publishing.
    """

    dtype: torch.dtype | None = None
    workers: int = 1
    overwrite: bool = False
    durable: bool = True


def hf_to_megatron(
    source: Path | str, out_dir: Path | str, options: Options, progress: job.Progress = lambda *_: None
) -> Path:
    """Convert a HF folder; any layout of the trainer can load the result.

    Raises:
        CheckpointError: the folder is not exactly one model that is supported, `out_dir` is in the way, or the disk is full.
    """
    opened = open_hf(Path(source))
    writer = _ToMegatron(Path(source), options.dtype)
    stacked = layers_are_stacked(opened.arch)
    all_places = places(opened.arch, stacked)
    dtypes: dict[str, tuple[torch.dtype, str]] = {}
    entries: list[tuple[str, int]] = []
    for name, place in all_places.items():
        entry = opened.mapping[name]
        dtype = _dtype(opened, entry, options.dtype)
        first, of = dtypes.setdefault(place.keys[0], (dtype, entry.hf[0]))
        if first != dtype:
            raise CheckpointError(
                f"{opened.where(entry.hf[0])}: {entry.hf[0]} is {dtype}, but {of} is {first}, and Megatron keeps both in {place.keys[0]}: "
                "choose one with --dtype"
            )
        entries.append((name, _elements(entry) * dtype.itemsize))
    total = sum(size for _, size in entries)
    groups = list(_grouped(entries, max(_FILE_BYTES, -(-total // _MAX_FILES))))
    outputs = [
        job.OutputFile(f"__0_{number}.distcp", tuple(name for name, _ in group), sum(size for _, size in group))
        for number, group in enumerate(groups)
    ]

    def finish(folder: Path, described: list[list[dict[str, Any]]]) -> None:
        records = []
        for output, items in zip(outputs, described, strict=True):
            for item in items:
                entry, place = opened.mapping[item["entry"]], all_places[item["entry"]]
                dtype = _dtype(opened, entry, options.dtype)
                shape = (*place.lead, *full_shape(entry))
                offsets = (*place.index, item["row"], *(0 for _ in shape[len(place.lead) + 1 :]))
                sizes = (*(1 for _ in place.lead), item["rows"], *shape[len(place.lead) + 1 :])
                for key in place.keys:
                    records.append(
                        PlacedRecord(key, shape, offsets, sizes, dtype, output.name, item["start"], item["length"])
                    )
        write_index(folder, records, extra_state_keys(opened.arch, stacked))
        side = folder / HF_FOLDER
        with naming_write_errors(side, "the files that go with the model"):
            side.mkdir(exist_ok=True)
            config = export_config(opened.hf_folder / "config.json", _main_dtype(opened, options.dtype))
            write_json(side / "config.json", config, options.durable)
            copy_companions(opened.hf_folder, side, options.durable)

    return _run(opened, writer, out_dir, outputs, {"to": "megatron", "stacked": stacked}, finish, options, progress)


def megatron_to_hf(
    source: Path | str,
    out_dir: Path | str,
    options: Options,
    hf_source: Path | str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: job.Progress = lambda *_: None,
) -> Path:
    """Convert a Megatron checkpoint, saved at any layout, to a HF folder.

    Args:
        source: see `sources.open_megatron`, which `hf_source` is for, too.
        max_shard_bytes: of tensors in a safetensors file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: the checkpoint is not the model of its config.json, `out_dir` is in the way, or the disk is full.
    """
    side = None if hf_source is None else Path(hf_source)
    opened = open_megatron(Path(source), side)
    plans = [
        TensorPlan(name, shape, _dtype(opened, entry, options.dtype))
        for entry in opened.mapping.values()
        if not entry.tied_copy
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True)
    ]
    (files,) = plan_shards([plans], max_shard_bytes)
    outputs = [job.OutputFile(file.name, tuple(tensor.name for tensor in file.tensors), file.size) for file in files]
    writer = _ToHF(Path(source), side, {plan.name: plan for plan in plans})

    def finish(folder: Path, _: list[list[dict[str, Any]]]) -> None:
        with naming_write_errors(folder, "the files that go with the model"):
            if len(outputs) > 1:
                weight_map = {tensor: output.name for output in outputs for tensor in output.contents}
                metadata = {"total_size": sum(output.size for output in outputs)}
                write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map}, options.durable)
            config = export_config(opened.hf_folder / "config.json", _main_dtype(opened, options.dtype))
            write_json(folder / "config.json", config, options.durable)
            copy_companions(opened.hf_folder, folder, options.durable)

    return _run(opened, writer, out_dir, outputs, {"to": "hf"}, finish, options, progress)


class _ToMegatron:
    """Writes `.distcp` files from a HF folder."""

    def __init__(self, source: Path, dtype: torch.dtype | None) -> None:
        self.source = source
        self.dtype = dtype
        self._opened: Source | None = None

    def write(self, output: job.OutputFile, path: Path, file: BinaryIO, on_bytes: OnBytes) -> list[dict[str, Any]]:
        source = self._opened = self._opened or open_hf(self.source)
        target = DistFile(path, file)
        items = []
        for name in output.contents:
            entry = source.mapping[name]
            dtype = _dtype(source, entry, self.dtype)
            lead = _lead(source, entry)
            for row, tensor in pieces(entry, tuple(source.tensor(hf) for hf in entry.hf)):
                record = target.add(
                    tensor,
                    (*lead, *tensor.shape),
                    dtype,
                    f"{name} ({', '.join(entry.hf)})",
                    _dropping(source, on_bytes),
                )
                items.append({"entry": name, "row": row, "rows": tensor.shape[0], **vars(record)})
        return items


class _ToHF:
    """Writes safetensors files from a Megatron checkpoint."""

    def __init__(self, source: Path, hf_source: Path | None, plans: dict[str, TensorPlan]) -> None:
        self.source = source
        self.hf_source = hf_source
        self.plans = plans
        self._opened: Source | None = None

    def write(self, output: job.OutputFile, path: Path, file: BinaryIO, on_bytes: OnBytes) -> list[dict[str, Any]]:
        source = self._opened = self._opened or open_megatron(self.source, self.hf_source)
        plans = [self.plans[name] for name in output.contents]
        target = SafetensorsFile(path, file, plans)
        items = []
        for plan in plans:
            start, checksum = target.add(source.tensor(plan.name), _dropping(source, on_bytes))
            items.append({"data": start, "size": plan.size, "checksum": checksum})
        return items


def _dropping(source: Source, on_bytes: OnBytes) -> OnBytes:
    def written(count: int) -> None:
        source.files.drop()
        on_bytes(count)

    return written


def _lead(source: Source, entry: ParamMapping) -> tuple[int, ...]:
    """Leading axes of size 1 that Megatron prepends: layer, expert."""
    layer = 1 if layers_are_stacked(source.arch) and entry.megatron.startswith("decoder.layers.") else 0
    return (1,) * (layer + (entry.expert is not None))


def _dtype(source: Source, entry: ParamMapping, cast: torch.dtype | None) -> torch.dtype:
    """What the entry's tensors are written as.

    Raises:
        CheckpointError: they differ, and none was chosen.
    """
    if cast is not None and not entry.buffer:
        return cast
    found = {source.dtype(name): name for name in entry.hf}
    if len(found) > 1:
        names = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise CheckpointError(
            f"{source.where(entry.hf[0])}: {names}, and Megatron keeps them in one parameter: choose one with --dtype"
        )
    return next(iter(found))


def _main_dtype(source: Source, cast: torch.dtype | None) -> torch.dtype:
    """The dtype that config.json names: that of most bytes."""
    if cast is not None:
        return cast
    sizes: dict[torch.dtype, int] = {}
    for entry in source.mapping.values():
        if not entry.tied_copy:
            dtype = _dtype(source, entry, None)
            sizes[dtype] = sizes.get(dtype, 0) + _elements(entry) * dtype.itemsize
    return max(sizes, key=lambda dtype: sizes[dtype])


def _elements(entry: ParamMapping) -> int:
    return sum(torch.Size(shape).numel() for shape in entry.hf_shapes)


def _grouped(sized: list[tuple[str, int]], limit: int) -> Iterator[list[tuple[str, int]]]:
    """Split into runs of at most `limit` bytes, or of one that is larger."""
    group: list[tuple[str, int]] = []
    size = 0
    for item in sized:
        if group and size + item[1] > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += item[1]
    if group:
        yield group


def _run(
    source: Source,
    writer: job.Writer,
    out_dir: Path | str,
    outputs: list[job.OutputFile],
    kind: dict[str, Any],
    finish: Any,
    options: Options,
    progress: job.Progress,
) -> Path:
    out_dir = Path(out_dir)
    fingerprint = {
        **kind,
        "source": str(source.folder.resolve()),
        "config": hashlib.sha256((source.hf_folder / "config.json").read_bytes()).hexdigest(),
        "files": sorted(
            (path.name, path.stat().st_size, path.stat().st_mtime_ns)
            for path in source.folder.iterdir()
            if path.is_file()
        ),
        "dtype": str(options.dtype),
        "outputs": [(output.name, output.size, len(output.contents)) for output in outputs],
    }
    done = job.run(
        job.Job(
            out_dir=out_dir,
            outputs=outputs,
            writer=writer,
            fingerprint=fingerprint,
            finish=finish,
            replaceable=partial(_check_replaceable, source, options.overwrite),
            workers=options.workers,
            durable=options.durable,
        ),
        progress,
    )
    source.files.close()
    return done


def _check_replaceable(source: Source, overwrite: bool, out_dir: Path) -> None:
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        return
    for used in (source.folder, source.hf_folder):
        if out_dir.resolve() == used.resolve() or out_dir.resolve() in used.resolve().parents:
            raise CheckpointError(f"{out_dir}: holds the checkpoint that is to be converted; name another folder")
    if not overwrite:
        raise CheckpointError(f"{out_dir}: already exists; name another folder, or replace it with --overwrite")
    if not (out_dir.is_dir() and is_torch_dist(out_dir)):
        check_replaceable(out_dir, source.hf_folder)
