"""From a HF folder into the parameters of one rank.

    with HFReader(folder) as reader:
        check_checkpoint(reader, mapping)
        load_parameters(dict(model.named_parameters()), reader, mapping, tp_rank, tp_size, layer_offset)

Every rank reads only the tensors that it needs; the files are mapped, so ranks of one machine share the page cache.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.hf import DTYPES, HFReader
from checkpoint_convert.mapping import ParamMapping, expert_of, global_name, hf_shapes, layer_of

logger = logging.getLogger(__name__)

# Old checkpoints store the rotary frequencies, which config.json determines.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# A layer beyond the model's last that joins hidden states and embeddings with this projection predicts further tokens.
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_PREDICTION_LAYER = "model.layers.{layer}.eh_proj.weight"
_TIED_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def check_checkpoint(reader: HFReader, mapping: Mapping[str, ParamMapping]) -> None:
    """Check that the folder holds exactly the mapping's tensors, with their shapes, in a float dtype.

    Layers for multi-token prediction (DeepSeek-V3, GLM-4.5) may follow the model's own: they are ignored, with a warning.

    Reads headers only, except for a tied model whose files hold the output layer too: it must equal the embedding
    (transformers would not tie two that differ).

    Raises:
        CheckpointError: names the first offending tensor of each kind, its file, and how many there are.
    """
    expected = hf_shapes(mapping)
    problems: list[str] = []
    missing = [name for name in expected if name not in reader]
    if missing:
        hint = ""
        if missing == [_TIED_OUTPUT]:
            hint = "; if its output layer is the embedding, set tie_word_embeddings to true in config.json"
        problems.append(f"{reader.dir}: tensor {_first_of(missing)} is missing{hint}")
    wrong = [name for name in expected if name in reader and reader.shape(name) != expected[name]]
    if wrong:
        info = reader.info(wrong[0])
        problems.append(
            f"{info.file}: tensor {_first_of(wrong)} has shape {info.shape}, config.json says {expected[wrong[0]]}"
        )
    dtypes = [name for name in expected if name in reader and reader.info(name).dtype not in DTYPES]
    if dtypes:
        info = reader.info(dtypes[0])
        problems.append(
            f"{info.file}: tensor {_first_of(dtypes)} has dtype {info.dtype}; only {', '.join(DTYPES)} weights are supported"
        )
    tied = _TIED_OUTPUT not in expected
    extra = [
        name
        for name in reader.names
        if name not in expected and not _DERIVED.search(name) and not (tied and name == _TIED_OUTPUT)
    ]
    prediction = _prediction_layers(reader, mapping, extra)
    extra = [name for name in extra if _hf_layer(name) not in prediction]
    if extra:
        problems.append(
            f"{reader.info(extra[0]).file}: tensor {_first_of(extra)} is not part of this model (see `architectures` in config.json)"
        )
    if problems:
        raise CheckpointError("\n".join(problems))
    if prediction:
        _warn_of_prediction_layers(str(reader.dir), tuple(sorted(prediction)))
    if tied and _TIED_OUTPUT in reader and not _identical(reader.tensor(_TIED_OUTPUT), reader.tensor(_EMBEDDING)):
        raise CheckpointError(
            f"{reader.info(_TIED_OUTPUT).file}: config.json ties the output layer to the embedding (tie_word_embeddings), but "
            f"{_TIED_OUTPUT} differs from {_EMBEDDING}: set it to false, or remove {_TIED_OUTPUT}"
        )


def load_shard(
    reader: HFReader,
    mapping: Mapping[str, ParamMapping],
    name: str,
    tp_rank: int,
    tp_size: int,
    *,
    etp_rank: int = 0,
    etp_size: int = 1,
) -> Tensor:
    """Return this rank's part of Megatron parameter `name` (global numbers), a new CPU tensor in the file's dtype.

    Args:
        tp_rank, tp_size: rank in the tensor parallel group.
        etp_rank, etp_size: rank in the expert tensor parallel group, which counts for routed experts instead.

    Raises:
        CheckpointError: `name` is not in the mapping, a HF tensor is missing, unreadable or of the wrong shape (the
            message names it and its file), or the group's size does not divide the parameter.
    """
    entry = mapping.get(name)
    if entry is None:
        raise CheckpointError(
            f"Megatron parameter {name} is made of no HF tensor of this family; the model was built with other options than the mapping"
        )
    for hf_name, shape in zip(entry.hf, entry.hf_shapes, strict=True):
        info = reader.info(hf_name)
        if info.shape != shape:
            raise CheckpointError(f"{info.file}: tensor {hf_name} has shape {info.shape}, config.json says {shape}")
    tensors = [reader.tensor(hf_name) for hf_name in entry.hf]
    rank, size = (tp_rank, tp_size) if entry.expert is None else (etp_rank, etp_size)
    shard = entry.split(tensors, rank, size)
    # A plain slice is still a view of the mapped file.
    return shard.clone() if any(_shares_memory(shard, tensor) for tensor in tensors) else shard.contiguous()


@torch.no_grad()
def load_parameters(
    parameters: Mapping[str, Tensor],
    reader: HFReader,
    mapping: Mapping[str, ParamMapping],
    tp_rank: int,
    tp_size: int,
    layer_offset: int = 0,
    *,
    etp_rank: int = 0,
    etp_size: int = 1,
    expert_offset: int = 0,
) -> None:
    """Fill one pipeline stage's parameters in place, cast to their own dtype and device.

    Args:
        parameters: `dict(model.named_parameters())` and the buffers that the mapping has (`ParamMapping.buffer`);
            `module.` prefixes are ignored; layers count from 0 within the stage, experts within the rank.
        tp_rank, tp_size, etp_rank, etp_size: as `load_shard`.
        layer_offset: global number of the stage's first layer.
        expert_offset: global number of the rank's first routed expert. The rank owns as many consecutive experts as
            `parameters` has.

    Raises:
        CheckpointError: as `load_shard`; or a layer of the model lacks a parameter that the checkpoint has (for example
            a model built without QK norms); or a parameter's shape differs from the mapping's.
    """
    named = {global_name(name, layer_offset, expert_offset): parameter for name, parameter in parameters.items()}
    layers = {layer_of(name) for name in named} - {None}
    last_expert = max([expert for name in named if (expert := expert_of(name)) is not None], default=expert_offset)
    absent = [
        name
        for name, entry in mapping.items()
        if layer_of(name) in layers
        and name not in named
        and (entry.expert is None or expert_offset <= entry.expert <= last_expert)
    ]
    if absent:
        raise CheckpointError(
            f"the Megatron model has no parameter {_first_of(absent)}, but the checkpoint does; it was built with other options than the mapping"
        )
    for name, parameter in named.items():
        shard = load_shard(reader, mapping, name, tp_rank, tp_size, etp_rank=etp_rank, etp_size=etp_size)
        if shard.shape != parameter.shape:
            expert = mapping[name].expert is not None
            group, rank, size = ("expert tensor", etp_rank, etp_size) if expert else ("tensor", tp_rank, tp_size)
            raise CheckpointError(
                f"Megatron parameter {name} has shape {tuple(parameter.shape)}, but its part of the checkpoint for {group}-parallel rank "
                f"{rank} of {size} has {tuple(shard.shape)}"
            )
        parameter.copy_(shard)


def _hf_layer(name: str) -> int:
    """Layer number in a HF tensor name, -1 outside the layers."""
    match = _HF_LAYER.match(name)
    return int(match[1]) if match else -1


def _prediction_layers(reader: HFReader, mapping: Mapping[str, ParamMapping], extra: list[str]) -> set[int]:
    layers = 1 + max((layer for name in mapping if (layer := layer_of(name)) is not None), default=-1)
    beyond = {layer for name in extra if (layer := _hf_layer(name)) >= layers}
    return {layer for layer in beyond if _PREDICTION_LAYER.format(layer=layer) in reader}


@functools.cache
def _warn_of_prediction_layers(folder: str, layers: tuple[int, ...]) -> None:
    """Once per folder and process."""
    logger.warning(
        "%s: layer %s predicts further tokens (MTP); it is neither trained nor exported",
        folder,
        ", ".join(map(str, layers)),
    )


def _identical(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
