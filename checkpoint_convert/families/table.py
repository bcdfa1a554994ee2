"""The vocabulary of the family tables: what an entry says. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Sizes of HF tensors by name; `ModelArchitecture.dims` gives the numbers.
Dim = Literal["vocab", "hidden", "ffn", "query", "kv", "head"]

# How a Megatron parameter is put together and split over tensor-parallel ranks; one rule class each in `rules`.
SplitKind = Literal["copy", "column", "row", "qkv", "gated_mlp", "vocab"]


@dataclass(frozen=True)
class HFTensor:
    """One HF tensor: its name, with `{layer}` where the layer number goes, and its dimensions in order."""

    name: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Param:
    """One Megatron parameter and the HF tensors that it is made of.

    Attributes:
        megatron: name in Megatron's *local* layer spec, `{layer}` for the global layer number; one with `{layer}`
            stands for one parameter per layer.
        split: how the parameter is split over tensor-parallel ranks.
        hf: tensors in the order that the rule expects.
        tied: `True`: it exists only for models with tied embeddings; `False`: only for untied; None: for both.
        tied_copy: the parameter is a second copy of weights that another one owns: loaded, never exported.
    """

    megatron: str
    split: SplitKind
    hf: tuple[HFTensor, ...]
    tied: bool | None = None
    tied_copy: bool = False


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        model_type: `model_type` in config.json.
        hf_class: the class that config.json's `architectures` must name, if it names one.
        params: every parameter of the model.
        qkv_bias, qk_norm: what the attention has, for the builder of the Megatron model.
        defaults: values that the HF config class takes for fields missing in config.json. A field that is
            neither here nor in config.json is an error.
        required: fields that may be present only with this value, because the table cannot express another.
        sliding_window: whether the HF class reads `use_sliding_window` and its companions.
    """

    model_type: str
    hf_class: str
    params: tuple[Param, ...]
    qkv_bias: bool
    qk_norm: bool
    defaults: Mapping[str, Any]
    required: Mapping[str, Any] = field(default_factory=dict)
    sliding_window: bool = False
