"""A model chunk's parameters under their global names, and how they are filled from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.utils import get_attr_wrapped_model

from checkpoint_convert.hf import HFReader
from checkpoint_convert.loading import check_checkpoint, load_parameters
from checkpoint_convert.mapping import ParamMapping, global_name
from checkpoint_convert.rules import Copy, Row
from dapo_megatron.actor.process_groups import Layout


def named_global_parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters with layer numbers counted over the whole model, in the same order on all TP ranks."""
    for chunk in chunks:
        model, offset = _unwrapped(chunk)
        for name, param in model.named_parameters():
            yield global_name(name, offset), param


def load_hf_weights(
    chunks: list[torch.nn.Module], reader: HFReader, mapping: Mapping[str, ParamMapping], layout: Layout
) -> None:
    """Fill the sharded model straight from safetensors; each rank reads only what it owns.

    Raises:
        CheckpointError: the folder does not hold exactly this model's tensors.
    """
    check_checkpoint(reader, mapping)
    for chunk in chunks:
        model, offset = _unwrapped(chunk)
        load_parameters(dict(model.named_parameters()), reader, mapping, layout.tp_rank, layout.tp_size, offset)


def mark_tensor_parallel(chunks: list[torch.nn.Module], mapping: Mapping[str, ParamMapping]) -> None:
    """Mark which parameters are shards, as Megatron itself only does when it initialises weights.

    Without the marks every shard but TP rank 0's counts as a replica: the gradient norm, and so clipping, is wrong.
    """
    for name, param in named_global_parameters(chunks):
        rule = mapping[name].rule
        if not isinstance(rule, Copy) and not getattr(param, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(param, True, 1 if isinstance(rule, Row) else 0, 1)


def _unwrapped(chunk: torch.nn.Module) -> tuple[torch.nn.Module, int]:
    """The GPTModel inside DDP, and the global number of its first layer."""
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    layers = model.decoder.layers
    return model, layers[0].layer_number - 1 if len(layers) else 0
