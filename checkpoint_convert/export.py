"""Writing a HF folder whose tensors come as streams, from one process or from several: safetensors shards, config.json,
tokenizer files.

    parts = plan_shards([tensor_plans(mapping, keys, torch.bfloat16) for keys in keys_of_each_process], max_shard_bytes)
    folder = ExportFolder(out_dir, source_dir, torch.bfloat16)
    folder.create()                                         # one process
    with ShardWriter(folder.incomplete, parts[i]) as writer:    # every process, its own part
        writer.add(name, tensor)                            # in the order of the plan
    folder.publish(parts)                                   # one process, when all are through

The folder appears whole or not at all: everything is written in a hidden folder beside it, then renamed. What is in which
file follows from names and shapes alone, so the processes agree without talking, and no tensor waits for its file to be full.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from checkpoint_convert.byte_stream import naming_write_errors
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families.experts import PREDICTION_LAYER_FIELDS
from checkpoint_convert.hf import DTYPES, INDEX_FILE, SINGLE_FILE
from checkpoint_convert.mapping import ParamMapping
from checkpoint_convert.safetensors_file import SafetensorsFile, TensorPlan

# What goes with the weights: tokenizer (fast, SentencePiece, tiktoken, BPE files, own code), chat templates, special
# tokens, generation settings, licence. Weights, indices and config.json are written anew.
_COMPANIONS = (
    "tokenizer*", "*.tiktoken", "*.model", "tokenization_*.py", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file to write, and its tensors in their order."""

    name: str
    tensors: tuple[TensorPlan, ...]

    @property
    def size(self) -> int:
        """Bytes of tensors."""
        return sum(tensor.size for tensor in self.tensors)


def tensor_plans(mapping: Mapping[str, ParamMapping], keys: Iterable[str], dtype: torch.dtype) -> list[TensorPlan]:
    """The HF tensors of `keys`, in order, as they are written in an export of `dtype`.

    Buffers (the router's `e_score_correction_bias`) stay float32, in which transformers keeps them whatever the model's
    dtype is. A tied copy is not written.
    """
    return [
        TensorPlan(name, shape, torch.float32 if entry.buffer else dtype)
        for entry in (mapping[key] for key in keys)
        if not entry.tied_copy
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True)
    ]


def plan_shards(
    parts: Sequence[Sequence[TensorPlan]], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> list[tuple[ShardFile, ...]]:
    """Split each part's tensors into files of at most `max_shard_bytes`, or of one tensor that is larger.

    The files of all parts are numbered through and make up one model together; they are as many on every process.
    """
    cut = [list(_runs(part, max_shard_bytes)) for part in parts]
    names = iter(_shard_names(sum(len(runs) for runs in cut)))
    return [tuple(ShardFile(next(names), run) for run in runs) for runs in cut]


def _runs(tensors: Sequence[TensorPlan], limit: int) -> Iterator[tuple[TensorPlan, ...]]:
    run: list[TensorPlan] = []
    size = 0
    for tensor in tensors:
        if run and size + tensor.size > limit:
            yield tuple(run)
            run, size = [], 0
        run.append(tensor)
        size += tensor.size
    if run:
        yield tuple(run)


def _shard_names(count: int) -> list[str]:
    return [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def incomplete_folder(out_dir: Path) -> Path:
    """Where the export to `out_dir` comes about. One fixed name, so that what a killed run left is cleared by the next."""
    return out_dir.absolute().parent / f".{out_dir.name}.incomplete"


class ExportFolder:
    """A HF folder in the making, and what stands in it beside the shards.

    Args:
        out_dir: the folder to be; an earlier export there is replaced.
        source_dir: the folder that the model came from, for config.json, tokenizer and generation settings.
        dtype: of the parameters, for config.json.
        durable: wait until everything is on disk before it is published, so that a crash of the machine cannot lose it.

    Raises:
        CheckpointError: `out_dir` is the source folder or holds something that is not a model; `source_dir` has no
            readable config.json; a dtype that config.json cannot name.
    """

    def __init__(self, out_dir: Path | str, source_dir: Path | str, dtype: torch.dtype, durable: bool = True) -> None:
        self.out_dir = Path(out_dir).absolute()
        self.incomplete = incomplete_folder(self.out_dir)
        self._source_dir = Path(source_dir).absolute()
        self._durable = durable
        if dtype not in DTYPES.values():
            raise CheckpointError(f"cannot export as {dtype}: use {', '.join(str(known) for known in DTYPES.values())}")
        self._config = export_config(self._source_dir / "config.json", dtype)
        check_replaceable(self.out_dir, self._source_dir)

    def create(self) -> None:
        """
        Raises:
            CheckpointError: the place cannot be written.
        """
        with naming_write_errors(self.incomplete, "a new folder"):
            shutil.rmtree(self.incomplete, ignore_errors=True)
            self.incomplete.mkdir(parents=True)

    def publish(self, parts: Sequence[Sequence[ShardFile]]) -> None:
        """Add what is missing beside the shards and give the folder its name.

        Raises:
            CheckpointError: a shard is not there, or the disk is full. Call `discard` then.
        """
        files = [file for part in parts for file in part]
        with naming_write_errors(self.incomplete, "the files that go with the model"):
            for file in files:
                self._check(file)
            if len(files) > 1:
                weight_map = dict(sorted((tensor.name, file.name) for file in files for tensor in file.tensors))
                metadata = {"total_size": sum(file.size for file in files)}
                write_json(
                    self.incomplete / INDEX_FILE, {"metadata": metadata, "weight_map": weight_map}, self._durable
                )
            write_json(self.incomplete / "config.json", self._config, self._durable)
            copy_companions(self._source_dir, self.incomplete, self._durable)
            if self._durable:
                sync(self.incomplete)
        with naming_write_errors(self.out_dir, "the finished model"):
            publish(self.incomplete, self.out_dir, self._durable)

    def discard(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self.incomplete, ignore_errors=True)

    def _check(self, file: ShardFile) -> None:
        path = self.incomplete / file.name
        found = path.stat().st_size if path.is_file() else 0
        if found < file.size:
            raise CheckpointError(
                f"{path}: has {found} bytes here, but its tensors have {file.size}: is the folder shared by all who write?"
            )


class ShardWriter:
    """Writes the files of one part, tensor by tensor. Use as a context manager: it closes the file that is open.

    Args:
        durable: wait until each file is on disk before the next is begun.
    """

    def __init__(self, folder: Path, files: Sequence[ShardFile], durable: bool = True) -> None:
        self._folder = folder
        self._left = iter(files)
        self._durable = durable
        self._due: list[TensorPlan] = []  # of the open file, the next one last
        self._path = folder
        self._file: BinaryIO | None = None
        self._content: SafetensorsFile | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor of the plan, cast to its planned dtype; on any device.

        Raises:
            CheckpointError: the disk is full or the file cannot be written; names it.
            ValueError: the tensor is not the next one, or has another shape than planned.
        """
        if not self._due:
            self._open()
        plan = self._due.pop()
        if name != plan.name:
            raise ValueError(f"{self._path}: {name} was given, but {plan.name} is next")
        assert self._content is not None
        self._content.append(tensor.detach().cpu())
        if not self._due:
            self._close()

    def finish(self) -> None:
        """
        Raises:
            ValueError: not all tensors were given.
        """
        left = self._due[::-1] + [tensor for file in self._left for tensor in file.tensors]
        if left:
            raise ValueError(f"{self._folder}: {left[0].name} was not given ({len(left)} tensors are missing)")

    def _open(self) -> None:
        file = next(self._left, None)
        if file is None:
            raise ValueError(f"{self._folder}: more tensors were given than planned")
        self._path = self._folder / file.name
        with naming_write_errors(self._path, "a new file"):
            self._file = self._path.open("wb", buffering=0)
        self._content = SafetensorsFile(self._path, self._file, file.tensors)
        self._due = list(reversed(file.tensors))

    def _close(self) -> None:
        assert self._file is not None
        with naming_write_errors(self._path, "the end of the file"):
            if self._durable:
                os.fsync(self._file.fileno())
            self._file.close()


def export_config(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Read a config.json, with its dtype set to that of the tensors that are written and without the layers for multi-token
    prediction, which are not."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read for the export: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    # transformers 5 writes `dtype`, older versions read only `torch_dtype`: neither may contradict the tensors.
    name = str(dtype).removeprefix("torch.")
    if "torch_dtype" in config:
        config["torch_dtype"] = name
    config["dtype"] = name
    for name in PREDICTION_LAYER_FIELDS & config.keys():
        config[name] = 0
    config.pop("_name_or_path", None)
    return config


def check_replaceable(out_dir: Path, source_dir: Path) -> None:
    """Refuse an `out_dir` that is or contains the source, or that holds anything but a HF model."""
    out, source = out_dir.resolve(), source_dir.resolve()
    if out == source or out in source.parents:
        raise CheckpointError(f"{out_dir}: the export would overwrite the model that it came from; name another folder")
    if not out_dir.exists():
        return
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not (out_dir / "config.json").is_file()):
        raise CheckpointError(
            f"{out_dir}: exists and is not a model folder; remove it or name another folder for the export"
        )


def copy_companions(source: Path, target: Path, durable: bool = True) -> None:
    """Copy what belongs to a model beside its weights and config.json; `durable` waits until it is on disk."""
    found = sorted({path for pattern in _COMPANIONS for path in source.glob(pattern)})
    for path in found:
        copy = target / path.name
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copyfile(path, copy)
        for written in sorted(copy.rglob("*")) if copy.is_dir() else [copy]:
            if durable:
                sync(written)


def publish(temporary: Path, out_dir: Path, durable: bool = True) -> None:
    """Rename `temporary` to `out_dir`; an earlier folder there is moved aside first and deleted last."""
    old = out_dir.parent / f".{out_dir.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(old)
    temporary.rename(out_dir)
    if durable:
        sync(out_dir.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, content: dict[str, Any], durable: bool = True) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if durable:
        sync(path)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
