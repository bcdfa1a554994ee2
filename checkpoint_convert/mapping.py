"""Which Megatron parameter is made of which HF tensors, for a whole model.

    mapping = build_mapping(read_architecture(folder), "local")
    entry = mapping["decoder.layers.3.self_attention.linear_qkv.weight"]
    shard = entry.split([q, k, v], tp_rank, tp_size)      # HF -> one rank's parameter
    for name, tensor in entry.merge(shards_of_all_ranks): # and back

Keys are the names of `GPTModel.named_parameters()` (megatron-core 0.16), and of the buffers that checkpoints hold, with
*global* numbers of layers and routed experts; a pipeline stage counts its layers, an expert parallel rank its experts from
0, see `global_name`. The loader, the exporter and the resharder all use this mapping.
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
from checkpoint_convert.rules import QKV, Column, Copy, FusedGatedMLP, GatedMLP, Row, Rule, Vocab

__all__ = [
    "QKV",
    "Column",
    "Copy",
    "FusedGatedMLP",
    "GatedMLP",
    "LayerSpec",
    "ParamMapping",
    "Row",
    "Rule",
    "Vocab",
    "build_mapping",
    "expert_of",
    "global_name",
    "hf_shapes",
    "layer_of",
]

LayerSpec = Literal["local", "te"]

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")
# SequentialMLP has a module per expert, TEGroupedMLP a weight per expert in one module.
_EXPERT = re.compile(r"^(.+\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(\..+)?$")


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter.

    Attributes:
        megatron: name, with the global layer and expert number.
        hf: names of the HF tensors that it is made of, in the order of the rule.
        hf_shapes: their shapes.
        rule: how it is split and merged.
        tied_copy: a second copy of weights that another entry owns (the output layer of a tied model on its own
            pipeline stage): load it, do not export or publish it.
        expert: global number of the routed expert that it belongs to, None outside. It exists only on expert parallel
            rank `expert // (num_experts / ep_size)`, and its rule splits it over the *expert* tensor parallel group.
        buffer: a Megatron buffer, not a parameter. It keeps float32 whatever the model's dtype is.
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    rule: Rule
    tied_copy: bool = False
    expert: int | None = None
    buffer: bool = False

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
    """Map every parameter and checkpointed buffer of the model, keyed by Megatron name, in model order (embedding, layers, final norm, output).

    Args:
        layer_spec: `local` or `te`, the Megatron layer spec that the model was built with (`te` with grouped experts).

    A tied model has an `output_layer.weight` entry with `tied_copy`: GPTModel has that parameter only on a last
    pipeline stage that is not also the first.
    """
    params = FAMILIES[arch.family].params
    per_layer = [param for param in params if "{layer}" in param.megatron]
    first = [param for param in params if param.megatron.startswith("embedding.")]
    last = [param for param in params if param not in per_layer and param not in first]
    entries = _entries(first, None, arch, layer_spec)
    for layer in range(arch.num_layers):
        entries += _entries(per_layer, layer, arch, layer_spec)
    entries += _entries(last, None, arch, layer_spec)
    return {entry.megatron: entry for entry in entries}


def hf_shapes(mapping: Mapping[str, ParamMapping]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every HF tensor of the model, each once."""
    return {
        name: shape
        for entry in mapping.values()
        if not entry.tied_copy
        for name, shape in zip(entry.hf, entry.hf_shapes, strict=True)
    }


def global_name(name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """Translate a parameter name of a pipeline stage and expert parallel rank into a key of the mapping.

    Args:
        name: as `named_parameters()` gives it; `module.` prefixes of wrappers (DDP, Float16Module) are dropped.
        layer_offset: global number of the stage's first layer (`get_transformer_layer_offset`).
        expert_offset: global number of the rank's first routed expert.
    """
    while name.startswith("module."):
        name = name[len("module.") :]
    layer = _LAYER.match(name)
    if layer:
        name = f"{layer[1]}{int(layer[2]) + layer_offset}{layer[3]}"
    expert = _EXPERT.match(name)
    return f"{expert[1]}{int(expert[2]) + expert_offset}{expert[3] or ''}" if expert else name


def layer_of(name: str) -> int | None:
    """Layer number in a Megatron parameter name, None outside the layers."""
    match = _LAYER.match(name)
    return int(match[2]) if match else None


def expert_of(name: str) -> int | None:
    """Number of the routed expert in a Megatron parameter name, None outside the routed experts."""
    match = _EXPERT.match(name)
    return int(match[2]) if match else None


def _entries(
    params: Sequence[Param], layer: int | None, arch: ModelArchitecture, layer_spec: LayerSpec
) -> list[ParamMapping]:
    """What the table's `params` are in this layer, or outside the layers."""
    conditions = arch.conditions(layer)
    entries: list[ParamMapping] = []
    for param in params:
        if not conditions.issuperset(param.when):
            continue
        experts: Sequence[int | None] = (None,)
        if arch.moe is not None and "{expert}" in param.megatron:
            experts = range(arch.moe.num_experts)
        entries += [_entry(param, layer, expert, arch, layer_spec) for expert in experts]
    return entries


def _entry(
    param: Param, layer: int | None, expert: int | None, arch: ModelArchitecture, layer_spec: LayerSpec
) -> ParamMapping:
    dims = arch.dims
    te = layer_spec == "te"
    name = param.te if te and param.te is not None else param.megatron
    return ParamMapping(
        megatron=name.format(layer=layer, expert=expert),
        hf=tuple(tensor.name.format(layer=layer, expert=expert) for tensor in param.hf),
        hf_shapes=tuple(tuple(dims[dim] for dim in tensor.dims) for tensor in param.hf),
        rule=_rule(param.split, arch),
        tied_copy=param.tied_copy,
        expert=expert,
        buffer=param.buffer,
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
        case "fused_gated_mlp":
            return FusedGatedMLP()
        case "vocab":
            return Vocab(arch.vocab_size)
