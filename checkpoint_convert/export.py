"""Writing a HF folder from a stream of tensors: safetensors shards, config.json, tokenizer files.

    export_hf(mapping, stream_of_name_and_tensor, out_dir, source_dir, torch.bfloat16)

The folder appears whole or not at all: everything is written and synced in a hidden folder beside it, then renamed.
Memory: one shard of `max_shard_bytes`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families.experts import PREDICTION_LAYER_FIELDS
from checkpoint_convert.hf import DTYPES, INDEX_FILE, SINGLE_FILE
from checkpoint_convert.mapping import ParamMapping, hf_shapes

# What goes with the weights: tokenizer (fast, SentencePiece, tiktoken, BPE files, own code), chat templates, special
# tokens, generation settings, licence. Weights, indices and config.json are written anew.
_COMPANIONS = (
    "tokenizer*", "*.tiktoken", "*.model", "tokenization_*.py", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates", "generation_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip

DEFAULT_SHARD_BYTES = 5_000_000_000


def export_hf(
    mapping: Mapping[str, ParamMapping],
    tensors: Iterable[tuple[str, Tensor]],
    out_dir: Path | str,
    source_dir: Path | str,
    dtype: torch.dtype,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write the model to `out_dir`, replacing an earlier export there.

    Args:
        tensors: (HF name, tensor) pairs in any order, each tensor once, on any device; consumed one by one, so buffers
            may be reused after the next pair is asked for.
        source_dir: the folder that the model came from, for config.json, tokenizer and generation settings.
        dtype: of every parameter written, and of config.json. Buffers (the router's `e_score_correction_bias`) are written
            in float32, in which transformers keeps them whatever the model's dtype is.

    Returns:
        `out_dir`.

    Raises:
        CheckpointError: a tensor is unknown, twice there, missing or of the wrong shape, or `out_dir` cannot be
            replaced. Nothing is published then.
    """
    expected = hf_shapes(mapping)
    buffers = {name for entry in mapping.values() if entry.buffer for name in entry.hf}
    with HFWriter(out_dir, source_dir, dtype, max_shard_bytes) as writer:
        for name, tensor in tensors:
            if name not in expected:
                raise CheckpointError(f"cannot export {name}: it is not a tensor of this model")
            if tuple(tensor.shape) != expected[name]:
                raise CheckpointError(f"cannot export {name}: shape {tuple(tensor.shape)}, expected {expected[name]}")
            writer.add(name, tensor, torch.float32 if name in buffers else dtype)
        missing = [name for name in expected if name not in writer.written]
        if missing:
            raise CheckpointError(
                f"cannot export to {out_dir}: {missing[0]} was not given ({len(missing)} of {len(expected)} tensors missing)"
            )
    return writer.out_dir


class HFWriter:
    """A HF folder in the making. Use as a context manager: leaving it normally publishes, an exception discards.

    Raises:
        CheckpointError: `out_dir` is the source folder or holds something that is not a model; `source_dir` has no
            readable config.json; a dtype that config.json cannot name.
    """

    def __init__(
        self,
        out_dir: Path | str,
        source_dir: Path | str,
        dtype: torch.dtype,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        self.out_dir = Path(out_dir).absolute()
        self.source_dir = Path(source_dir).absolute()
        self.dtype = dtype
        self.max_shard_bytes = max_shard_bytes
        self.written: dict[str, int] = {}  # tensor name -> shard number, from 0
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._total_bytes = 0
        self._shards = 0
        if dtype not in DTYPES.values():
            raise CheckpointError(f"cannot export as {dtype}: use {', '.join(str(known) for known in DTYPES.values())}")
        self._config = export_config(self.source_dir / "config.json", dtype)
        check_replaceable(self.out_dir, self.source_dir)
        # One fixed name, so that what a killed run left behind is cleared by the next.
        self._temporary = self.out_dir.parent / f".{self.out_dir.name}.incomplete"

    def __enter__(self) -> HFWriter:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Take a copy of `tensor` on the CPU, in `dtype` (None: the export's); write a shard when it is full.

        Raises:
            CheckpointError: `name` was added before.
        """
        if name in self.written:
            raise CheckpointError(f"cannot export {name}: it was given twice")
        dtype = dtype or self.dtype
        size = tensor.numel() * dtype.itemsize
        if self._shard and self._shard_bytes + size > self.max_shard_bytes:
            self._flush()
        copy = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        copy.copy_(tensor.detach())
        self._shard[name] = copy
        self._shard_bytes += size
        self._total_bytes += size
        self.written[name] = self._shards

    def _flush(self) -> None:
        path = self._temporary / _part(self._shards)
        save_file(self._shard, path, metadata={"format": "pt"})
        sync(path)
        self._shards += 1
        self._shard = {}
        self._shard_bytes = 0

    def _finish(self) -> None:
        if self._shard or not self._shards:
            self._flush()
        files = (
            [SINGLE_FILE]
            if self._shards == 1
            else [f"model-{i + 1:05d}-of-{self._shards:05d}.safetensors" for i in range(self._shards)]
        )
        for number, file in enumerate(files):
            (self._temporary / _part(number)).rename(self._temporary / file)
        if self._shards > 1:
            weight_map = {name: files[number] for name, number in self.written.items()}
            write_json(
                self._temporary / INDEX_FILE, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            )
        write_json(self._temporary / "config.json", self._config)
        # safetensors makes files that only their owner may read; give them the mode of any other new file.
        mode = (self._temporary / "config.json").stat().st_mode
        for file in files:
            (self._temporary / file).chmod(mode)
        copy_companions(self.source_dir, self._temporary)
        sync(self._temporary)
        publish(self._temporary, self.out_dir)


def _part(number: int) -> str:
    return f"part-{number:05d}.safetensors"


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
