"""Under which keys Megatron keeps a model in a distributed checkpoint, and how its tensors lie there.

`GPTModel.sharded_state_dict` (megatron-core 0.16) does not use the names of `named_parameters()`:

- the layers of a dense model are stacked: `decoder.layers.mlp.linear_fc2.weight` is `[layers, out, in]`, a layer's
  parameter lies at its *global* number. Models with experts have a key per layer, `decoder.layers.3...`, because the
  trainer lists which layers have experts (`moe_layer_freq`); so has every model saved with `non_homogeneous_layers`;
- routed experts are stacked within a layer: `...mlp.experts.experts.linear_fc1.weight` is `[experts, out, in]`;
- norms have the names that Transformer Engine's fused layers give them, also with the local layer spec, except where a
  spec has no fused layer; a record may be listed under both;
- tensor parallel shards are put together: a key's tensor is what one rank would hold without tensor parallelism. A gate
  and an up projection are two pieces, one above the other;
- vocabulary rows may be padded; Megatron accepts any padding and so does the reader here;
- the output layer of a tied model is the embedding, under the embedding's key;
- linear layers ask for an `_extra_state`, which is None except with FP8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.architecture import ModelArchitecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.hf import DTYPES
from checkpoint_convert.mapped_files import MappedFiles
from checkpoint_convert.mapping import ParamMapping, build_mapping, layer_of
from checkpoint_convert.rules import GatedMLP, Vocab
from checkpoint_convert.torch_dist import StoredTensor, TorchDistReader

_LAYERS = "decoder.layers."
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.\d+\.")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12]\.weight)\d+$")
# `sharded_state_dict_keys_map` of Megatron's local layer specs.
_LOCAL_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Modules of a Transformer Engine layer that keep an extra state and have no linear weight.
_MORE_STATES = ("self_attention.core_attention", "input_layernorm", "pre_mlp_layernorm")
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_PREFIXES = ("", "model.")


@dataclass(frozen=True)
class Place:
    """Where a Megatron parameter lies.

    Attributes:
        keys: of the checkpoint's tensor; several where layer specs disagree.
        index: position along the leading axes (layer, expert); empty for a tensor of its own.
        lead: sizes of those axes.
    """

    keys: tuple[str, ...]
    index: tuple[int, ...]
    lead: tuple[int, ...]


def layers_are_stacked(arch: ModelArchitecture) -> bool:
    """Whether the trainer's model asks for one tensor for all layers."""
    return arch.moe is None


def places(arch: ModelArchitecture, stacked: bool) -> dict[str, Place]:
    """Where each parameter of `build_mapping(arch, "local")` lies; tied copies have no place."""
    te_names = {entry.hf: name for name, entry in build_mapping(arch, "te").items() if not entry.tied_copy}
    found = {}
    for name, entry in build_mapping(arch, "local").items():
        if entry.tied_copy:
            continue
        # The local spec for latent attention renames nothing.
        local = name if arch.latent_attention is not None else _renamed(name)
        keys = {_key(local, stacked): None, _key(te_names[entry.hf], stacked): None}
        layer = layer_of(name)
        index, lead = [], []
        if stacked and layer is not None:
            index, lead = [layer], [arch.num_layers]
        if entry.expert is not None and arch.moe is not None:
            index, lead = [*index, entry.expert], [*lead, arch.moe.num_experts]
        found[name] = Place(tuple(keys), tuple(index), tuple(lead))
    return found


def _renamed(name: str) -> str:
    """The local spec's name, with the keys that the spec gives its norms."""
    layer = layer_of(name)
    if layer is not None:
        prefix = f"{_LAYERS}{layer}."
        for local, key in _LOCAL_KEYS.items():
            if name.startswith(prefix + local):
                return prefix + key + name[len(prefix + local) :]
    return name


def _key(name: str, stacked: bool) -> str:
    name = _GROUPED_EXPERT.sub(r".mlp.experts.experts.\1", _EXPERT.sub(".mlp.experts.experts.", name))
    layer = layer_of(name)
    return name.replace(f"{_LAYERS}{layer}.", _LAYERS) if stacked and layer is not None else name


def pieces(entry: ParamMapping, tensors: tuple[Tensor, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yield what the checkpoint's tensor for `entry` is made of: first row, and rows.

    Args:
        tensors: the HF tensors of the entry. They are passed on as they are where rows need not be mixed.
    """
    if isinstance(entry.rule, GatedMLP):
        row = 0
        for tensor in tensors:
            yield row, tensor
            row += tensor.shape[0]
    elif len(tensors) == 1:  # without tensor parallelism the parameter is the HF tensor
        yield 0, tensors[0]
    else:
        yield 0, entry.split(tensors, 0, 1)


def full_shape(entry: ParamMapping) -> tuple[int, ...]:
    """Shape of the parameter without tensor parallelism."""
    return entry.shard_shape(1)


def extra_state_keys(arch: ModelArchitecture, stacked: bool) -> list[str]:
    """Keys of all `_extra_state` objects that a model of either layer spec may ask for."""
    found: dict[str, None] = {"decoder.final_layernorm._extra_state/shard_0_1": None}
    for name, place in places(arch, stacked).items():
        layer = layer_of(name)
        modules = {key.rsplit(".", 1)[0] for key in place.keys if ".linear_" in key or "_layernorm." in key}
        if layer is not None and name.endswith("input_layernorm.weight"):
            modules |= {_key(f"{_LAYERS}{layer}.{module}", stacked) for module in _MORE_STATES}
        index, lead = (place.index, place.lead) if place.lead else ((0,), (1,))
        shard = ".".join(map(str, index)) + "_" + ".".join(map(str, lead))
        found |= dict.fromkeys(f"{module}._extra_state/shard_{shard}" for module in sorted(modules))
    return list(found)


class MegatronReader:
    """A model in a distributed checkpoint, as HF tensors. Opening checks that it is the model that config.json describes.

    Keys may have the prefix `model.`; what is not the model's (optimizer, scheduler, random states) is ignored.

    Args:
        arch: of the model that should be in there; `config` is where that was read.

    Raises:
        CheckpointError: the folder is unreadable, or a tensor is missing, unknown or of the wrong shape.
    """

    def __init__(self, folder: Path, arch: ModelArchitecture, config: Path, files: MappedFiles) -> None:
        self.folder = folder
        self._reader = TorchDistReader(folder, files)
        self._prefix = _prefix(self._reader)
        self.mapping = build_mapping(arch, "local")
        numbered = any(re.match(rf"{re.escape(self._prefix + _LAYERS)}\d", key) for key in self._reader.tensors)
        self.stacked = not numbered
        self._places = places(arch, self.stacked)
        self._stored = {
            name: next((found for key in place.keys if (found := self._reader.tensors.get(self._prefix + key))), None)
            for name, place in self._places.items()
        }
        self._check(arch, config)
        # What was merged with the tensor asked for last, as queries with keys and values.
        self._merged: dict[str, Tensor] = {}
        self._entry_of = {hf: name for name in self._places for hf in self.mapping[name].hf}

    def stored(self, name: str) -> StoredTensor:
        """The checkpoint's tensor that HF tensor `name` is a part of."""
        found = self._stored[self._entry_of[name]]
        assert found is not None  # checked on opening
        return found

    def dtype(self, name: str) -> torch.dtype:
        return self.stored(name).dtype

    def tensor(self, name: str) -> Tensor:
        """Return a HF tensor, without vocabulary padding: where possible a view of the file."""
        entry = self.mapping[self._entry_of[name]]
        if isinstance(entry.rule, GatedMLP):
            position = entry.hf.index(name)
            rows = sum(shape[0] for shape in entry.hf_shapes[:position])
            return self._read(entry, rows, entry.hf_shapes[position])
        if len(entry.hf) == 1:
            return self._read(entry, 0, entry.hf_shapes[0])
        if name not in self._merged:
            self._merged = dict(entry.merge([self._read(entry, 0, full_shape(entry))]))
        return self._merged.pop(name)

    def _read(self, entry: ParamMapping, row: int, shape: tuple[int, ...]) -> Tensor:
        place, stored = self._places[entry.megatron], self._stored[entry.megatron]
        assert stored is not None
        lead = len(place.index)
        offsets = (*place.index, row, *(0 for _ in shape[1:]))
        return self._reader.read(stored.key, offsets, (*(1 for _ in range(lead)), *shape)).reshape(shape)

    def _check(self, arch: ModelArchitecture, config: Path) -> None:
        problems: list[str] = []
        missing = [self._prefix + self._places[name].keys[0] for name, stored in self._stored.items() if stored is None]
        if missing:
            problems.append(f"{self.folder}: tensor {_first_of(missing)} is missing, which {config} asks for")
        wrong: dict[str, str] = {}
        for name, stored in self._stored.items():
            if stored is None:
                continue
            entry = self.mapping[name]
            expected = (*self._places[name].lead, *full_shape(entry))
            padded = (
                isinstance(entry.rule, Vocab) and stored.shape[1:] == expected[1:] and stored.shape[0] >= expected[0]
            )
            if stored.shape != expected and not padded:
                wrong.setdefault(
                    stored.key, f"tensor {stored.key} has shape {list(stored.shape)}, {config} says {list(expected)}"
                )
            elif stored.dtype not in DTYPES.values():
                wrong.setdefault(
                    stored.key, f"tensor {stored.key} has dtype {stored.dtype}; supported are {', '.join(DTYPES)}"
                )
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            problems.append(f"{self.folder}: {next(iter(wrong.values()))}{more}")
        known = {self._prefix + key for place in self._places.values() for key in place.keys}
        extra = [
            key
            for key in self._reader.tensors
            if key.startswith(tuple(self._prefix + name for name in _MODEL_KEYS)) and key not in known
        ]
        if extra:
            hint = ""
            if arch.tie_word_embeddings and extra == [f"{self._prefix}output_layer.weight"]:
                hint = "; it was trained with an output layer of its own: tie_word_embeddings must be false"
            problems.append(f"{self.folder}: tensor {_first_of(extra)} is not part of the model of {config}{hint}")
        if problems:
            raise CheckpointError("\n".join(problems))


def model_keys(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Keys of the model's tensors, with or without a prefix."""
    starts = tuple(prefix + name for prefix in _PREFIXES for name in _MODEL_KEYS)
    return [key for key in tensors if key.startswith(starts)]


def _prefix(reader: TorchDistReader) -> str:
    for prefix in _PREFIXES:
        if any(key.startswith(prefix + "embedding.") for key in reader.tensors):
            return prefix
    raise CheckpointError(
        f"{reader.folder}: no tensor embedding.word_embeddings.weight, with or without the prefix 'model.'; this is not the checkpoint of a GPT model"
    )


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
