"""A model chunk's parameters under their global names, and how they are filled from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from checkpoint_convert.hf import HFReader
from checkpoint_convert.loading import check_checkpoint, load_parameters
from checkpoint_convert.mapping import ParamMapping, global_name
from checkpoint_convert.rules import Copy, Row
from dapo_megatron.actor.process_groups import Layout


def named_global_parameters(
    chunks: Sequence[torch.nn.Module], mapping: Mapping[str, ParamMapping], expert_offset: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parameters, and the buffers that the mapping knows, under the mapping's keys.

    Layers and experts are counted over the whole model. The order is the same on all ranks that hold the same layers.

    Args:
        expert_offset: global number of this rank's first routed expert (`Layout.expert_offset`).
    """
    for chunk in chunks:
        model, layer_offset = _unwrapped(chunk)
        for name, param in model.named_parameters():
            yield global_name(name, layer_offset, expert_offset), param
        for name, buffer in model.named_buffers():
            key = global_name(name, layer_offset, expert_offset)
            if key in mapping:
                yield key, buffer


def expert_biases(chunks: Sequence[torch.nn.Module]) -> list[Tensor]:
    """The selection biases of this rank's routers: buffers that follow the load instead of a gradient."""
    return [buffer for chunk in chunks for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")]


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    reader: HFReader,
    mapping: Mapping[str, ParamMapping],
    layout: Layout,
    experts: int,
) -> None:
    """Fill the sharded model straight from safetensors; each rank reads only what it owns.

    Args:
        experts: routed experts of a layer in the whole model, 0 without.

    Raises:
        CheckpointError: the folder does not hold exactly this model's tensors.
    """
    check_checkpoint(reader, mapping)
    expert_offset = layout.expert_offset(experts)
    for chunk in chunks:
        model, layer_offset = _unwrapped(chunk)
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        tensors |= {n: b for n, b in buffers.items() if global_name(n, layer_offset, expert_offset) in mapping}
        load_parameters(
            tensors,
            reader,
            mapping,
            layout.tp_rank,
            layout.tp_size,
            layer_offset,
            etp_rank=layout.etp_rank,
            etp_size=layout.etp_size,
            expert_offset=expert_offset,
        )


def mark_tensor_parallel(
    chunks: Sequence[torch.nn.Module], mapping: Mapping[str, ParamMapping], expert_offset: int = 0
) -> None:
    """Mark which parameters are shards, as Megatron itself only does when it initialises weights.

    Without the marks every shard but TP rank 0's counts as a replica: the gradient norm, and so clipping, is wrong.
    """
    for name, param in named_global_parameters(chunks, mapping, expert_offset):
        rule = mapping[name].rule
        if not isinstance(rule, Copy) and not getattr(param, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(param, True, 1 if isinstance(rule, Row) else 0, 1)


def _unwrapped(chunk: torch.nn.Module) -> tuple[torch.nn.Module, int]:
    """The GPTModel inside DDP, and the global number of its first layer."""
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    layers = model.decoder.layers
    return model, layers[0].layer_number - 1 if len(layers) else 0
