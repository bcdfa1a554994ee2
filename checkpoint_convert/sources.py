"""A checkpoint of either format, opened for reading as HF tensors. Opening checks everything that headers can tell."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from checkpoint_convert.architecture import ModelArchitecture, read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.hf import DTYPES, HFReader
from checkpoint_convert.loading import check_checkpoint
from checkpoint_convert.mapped_files import MappedFiles
from checkpoint_convert.mapping import build_mapping, hf_shapes
from checkpoint_convert.megatron import MegatronReader
from checkpoint_convert.torch_dist import CONFIG_FILE, TorchDistReader, is_torch_dist

# Inside a Megatron checkpoint: the model's own folder of a training checkpoint, and what goes with it on the HF side.
MODEL_FOLDER = "model"
HF_FOLDER = "hf"


class Source:
    """The tensors of a checkpoint under their HF names.

    Attributes:
        folder: holds the weights.
        hf_folder: holds config.json and tokenizer.
        shapes: of every HF tensor, in model order.
        files: drop their pages when a tensor is done with.
    """

    def __init__(self, folder: Path, hf_folder: Path, reader: HFReader | MegatronReader, files: MappedFiles) -> None:
        self.folder = folder
        self.hf_folder = hf_folder
        self.files = files
        self.arch = read_architecture(hf_folder)
        self.mapping = build_mapping(self.arch, "local")
        self.shapes = hf_shapes(self.mapping)
        self._reader = reader

    @property
    def kind(self) -> Literal["hf", "megatron"]:
        return "hf" if isinstance(self._reader, HFReader) else "megatron"

    @property
    def stacked(self) -> bool:
        """Whether a Megatron checkpoint has one tensor for all layers."""
        return isinstance(self._reader, MegatronReader) and self._reader.stacked

    def dtype(self, name: str) -> torch.dtype:
        if isinstance(self._reader, HFReader):
            return DTYPES[self._reader.info(name).dtype]
        return self._reader.dtype(name)

    def where(self, name: str) -> Path:
        """The file, or for a tensor in several the folder, that holds the tensor."""
        if isinstance(self._reader, HFReader):
            return self._reader.info(name).file
        holding = {piece.file for piece in self._reader.stored(name).pieces}
        return holding.pop() if len(holding) == 1 else self.folder

    def tensor(self, name: str) -> Tensor:
        """Return the tensor, mostly a view of a file; do not write into it."""
        if isinstance(self._reader, HFReader):
            info = self._reader.info(name)
            return self.files.tensor(info.file, info.start, info.shape, DTYPES[info.dtype])
        return self._reader.tensor(name)


def open_hf(folder: Path) -> Source:
    """Open a HF folder.

    Raises:
        CheckpointError: an unsupported model, missing, unknown or wrongly shaped tensors, a truncated file.
    """
    arch = read_architecture(folder)
    reader = HFReader(folder)
    check_checkpoint(reader, build_mapping(arch, "local"))
    reader.close()  # a tied output layer was compared through it
    return Source(folder, folder, reader, MappedFiles())


def open_megatron(folder: Path, hf_source: Path | None = None) -> Source:
    """Open a Megatron checkpoint: a folder of `dist_checkpointing`, or one whose subfolder `model` is that.

    Args:
        hf_source: folder with config.json and tokenizer; if None, the subfolder `hf` or the folder itself has them.

    Raises:
        CheckpointError: no such checkpoint, no config.json, or the checkpoint is not the model of config.json.
    """
    weights = next((place for place in (folder, folder / MODEL_FOLDER) if (place / CONFIG_FILE).is_file()), folder)
    own = [place for place in (folder / HF_FOLDER, weights / HF_FOLDER, folder) if (place / "config.json").is_file()]
    files = MappedFiles()
    if not is_torch_dist(weights):
        TorchDistReader(weights, files)  # says what is missing
    if hf_source is None and not own:
        raise CheckpointError(
            f"{folder}: neither {HF_FOLDER}/config.json nor config.json is there; name the model it came from with --hf-source"
        )
    hf_folder = hf_source or own[0]
    arch = read_architecture(hf_folder)
    if hf_source is not None and own:
        different = architecture_differences(read_architecture(own[0]), arch)
        if different:
            raise CheckpointError(f"{folder} and {hf_source} are different models: " + "; ".join(different))
    return Source(weights, hf_folder, MegatronReader(weights, arch, hf_folder / "config.json", files), files)


def open_checkpoint(folder: Path, hf_source: Path | None = None) -> Source:
    """Open a folder of either format."""
    if any((place / CONFIG_FILE).is_file() for place in (folder, folder / MODEL_FOLDER)):
        return open_megatron(folder, hf_source)
    return open_hf(folder)


def architecture_differences(first: ModelArchitecture, second: ModelArchitecture) -> list[str]:
    """What two models differ in: each field with the first's value and the second's."""
    return [
        f"{field.name} is {getattr(first, field.name)} and {getattr(second, field.name)}"
        for field in dataclasses.fields(ModelArchitecture)
        if getattr(first, field.name) != getattr(second, field.name)
    ]
