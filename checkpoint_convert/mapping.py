"""Which Megatron parameter is made of which HF tensors, for a whole model.

    mapping = build_mapping(read_architecture(folder), "local")
    entry = mapping["decoder.layers.3.self_attention.linear_qkv.weight"]
    shard = entry.split([q, k, v], tp_rank, tp_size)      # HF -> one rank's parameter
    for name, tensor in entry.merge(shards_of_all_ranks): # and back

Keys are the names of `GPTModel.named_parameters()` (megatron-core 0.16) with *global* layer numbers; a pipeline stage
counts its layers from 0, see `global_name`. The loader, the exporter and the resharder all use this mapping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from checkpoint_convert.architecture import ModelArchitecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.table import Param, SplitKind
from checkpoint_convert.rules import QKV, Column, Copy, GatedMLP, Row, Rule, Vocab

__all__ = [
    "QKV",
    "Column",
    "Copy",
    "GatedMLP",
    "LayerSpec",
    "ParamMapping",
    "Row",
    "Rule",
    "Vocab",
    "build_mapping",
    "global_name",
    "hf_shapes",
    "layer_of",
]

LayerSpec = Literal["local", "te"]

# Transformer Engine fuses a norm with the linear layer that follows it, and names its weight after the latter.
_TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter.

    Attributes:
        megatron: name, with the global layer number.
        hf: names of the HF tensors that it is made of, in the order of the rule.
        hf_shapes: their shapes.
        rule: how it is split and merged.
        tied_copy: a second copy of weights that another entry owns (the output layer of a tied model on its own
            pipeline stage): load it, do not export or publish it.
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    rule: Rule
    tied_copy: bool = False

    def split(self, hf: Sequence[Tensor], tp_rank: int, tp_size: int) -> Tensor:
        """Return rank `tp_rank`'s shard, which may share memory with `hf`.

        Raises:
            CheckpointError: a tensor has another shape, or `tp_size` does not divide the parameter.
        """
        for name, tensor, shape in zip(self.hf, hf, self.hf_shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        try:
            return self.rule.split(hf, tp_rank, tp_size)
        except ValueError as error:
            raise CheckpointError(f"{self.megatron} ({', '.join(self.hf)}): {error}") from error

    def merge(self, shards: Sequence[Tensor]) -> tuple[tuple[str, Tensor], ...]:
        """Return (HF name, tensor) pairs from the shards of all TP ranks in rank order; they may share memory with `shards`.

        Raises:
            CheckpointError: a shard has the wrong shape.
        """
        expected = self.shard_shape(len(shards))
        for rank, shard in enumerate(shards):
            if tuple(shard.shape) != expected:
                raise CheckpointError(
                    f"{self.megatron}: the shard of tensor-parallel rank {rank} of {len(shards)} has shape {tuple(shard.shape)}, expected {expected}"
                )
        return tuple(zip(self.hf, self.rule.merge(shards), strict=True))

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one rank's parameter, the same on all ranks."""
        return tuple(self.split([torch.empty(shape, device="meta") for shape in self.hf_shapes], 0, tp_size).shape)


def build_mapping(arch: ModelArchitecture, layer_spec: LayerSpec) -> dict[str, ParamMapping]:
    """Map every parameter of the model, keyed by Megatron name, in model order (embedding, layers, final norm, output).

    Args:
        layer_spec: `local` or `te`, the Megatron layer spec that the model was built with.

    A tied model has an `output_layer.weight` entry with `tied_copy`: GPTModel has that parameter only on a last
    pipeline stage that is not also the first.
    """
    params = [param for param in FAMILIES[arch.family].params if param.tied in (None, arch.tie_word_embeddings)]
    per_layer = [param for param in params if "{layer}" in param.megatron]
    first = [param for param in params if param.megatron.startswith("embedding.")]
    last = [param for param in params if param not in per_layer and param not in first]
    entries = [_entry(param, None, arch, layer_spec) for param in first]
    entries += [_entry(param, layer, arch, layer_spec) for layer in range(arch.num_layers) for param in per_layer]
    entries += [_entry(param, None, arch, layer_spec) for param in last]
    return {entry.megatron: entry for entry in entries}


def hf_shapes(mapping: Mapping[str, ParamMapping]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every HF tensor of the model, each once."""
    return {
        name: shape
        for entry in mapping.values()
        if not entry.tied_copy
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True)
    }


def global_name(name: str, layer_offset: int) -> str:
    """Translate a parameter name of a pipeline stage into a key of the mapping.

    Args:
        name: as `named_parameters()` gives it; `module.` prefixes of wrappers (DDP, Float16Module) are dropped.
        layer_offset: global number of the stage's first layer (`get_transformer_layer_offset`).
    """
    while name.startswith("module."):
        name = name[len("module.") :]
    match = _LAYER.match(name)
    return f"{match[1]}{int(match[2]) + layer_offset}{match[3]}" if match else name


def layer_of(name: str) -> int | None:
    """Layer number in a Megatron parameter name, None outside the layers."""
    match = _LAYER.match(name)
    return int(match[2]) if match else None


def _entry(param: Param, layer: int | None, arch: ModelArchitecture, layer_spec: LayerSpec) -> ParamMapping:
    dims = arch.dims
    megatron = param.megatron
    if layer_spec == "te":
        for local, fused in _TE_NAMES.items():
            megatron = megatron.replace("{layer}." + local, "{layer}." + fused)
    return ParamMapping(
        megatron=megatron.format(layer=layer),
        hf=tuple(tensor.name.format(layer=layer) for tensor in param.hf),
        hf_shapes=tuple(tuple(dims[dim] for dim in tensor.dims) for tensor in param.hf),
        rule=_rule(param.split, arch),
        tied_copy=param.tied_copy,
    )


def _rule(kind: SplitKind, arch: ModelArchitecture) -> Rule:
    match kind:
        case "copy":
            return Copy()
        case "column":
            return Column()
        case "row":
            return Row()
        case "qkv":
            return QKV(arch.num_attention_heads, arch.num_query_groups, arch.head_dim)
        case "gated_mlp":
            return GatedMLP()
        case "vocab":
            return Vocab(arch.vocab_size)
