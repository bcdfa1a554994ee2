"""The vocabulary of the family tables: what an entry says. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoint_convert.config_fields import Fields
from checkpoint_convert.parts import LatentAttention, MixtureOfExperts

# Sizes of HF tensors by name; `ModelArchitecture.dims` gives the numbers.
Dim = Literal[
    "vocab", "hidden", "ffn", "gate_and_up", "query", "kv", "head",
    "experts", "expert_ffn", "shared_ffn",
    "query_latent", "kv_latent", "kv_latent_and_rope", "latent_query", "latent_key_value", "latent_value",
]  # fmt: skip

# How a Megatron parameter is put together and split over tensor-parallel ranks; one rule class each in `rules`.
SplitKind = Literal["copy", "column", "row", "qkv", "gated_mlp", "fused_gated_mlp", "vocab"]

# What a model or one of its layers may have; `ModelArchitecture.conditions` says what holds.
Condition = Literal[
    "tied", "untied", "qkv_bias", "qk_norm", "query_latent", "direct_query", "dense_mlp", "experts",
]  # fmt: skip


@dataclass(frozen=True)
class HFTensor:
    """One HF tensor: its name, with `{layer}` and `{expert}` where the numbers go, and its dimensions in order."""

    name: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Param:
    """One Megatron parameter and the HF tensors that it is made of.

    Attributes:
        megatron: name in Megatron's *local* layer spec, `{layer}` for the global layer number, `{expert}` for the global
            number of a routed expert; it stands for one parameter per layer and expert.
        split: how the parameter is split over tensor-parallel ranks; a routed expert's is split over expert tensor
            parallel ranks.
        hf: tensors in the order that the rule expects.
        when: exists only where all of these hold.
        te: name in Transformer Engine's layer spec where it differs; TE fuses a norm with the linear layer that follows
            it and names its weight after the latter.
        tied_copy: the parameter is a second copy of weights that another one owns: loaded, never exported.
        buffer: a Megatron buffer, not a parameter.
    """

    megatron: str
    split: SplitKind
    hf: tuple[HFTensor, ...]
    when: tuple[Condition, ...] = ()
    te: str | None = None
    tied_copy: bool = False
    buffer: bool = False


@dataclass(frozen=True)
class Family:
    """A model family: its parameters, and how its config.json is read.

    Attributes:
        model_type: `model_type` in config.json.
        hf_class: the class that config.json's `architectures` must name, if it names one.
        params: every parameter of the model.
        qkv_bias, qk_norm: whether the attention has them, or the boolean field of config.json that says so.
        defaults: values that the HF config class takes for fields missing in config.json. A field that is
            neither here nor in config.json is an error.
        reads: fields without a default that `moe`, `latent_attention` and the like read.
        required: fields that may be present only with this value (a tuple: one of these), because the table cannot
            express another.
        aliases: second names of fields, `{second name: name}`; transformers writes some under a name that the
            published folders do not use.
        own_code: values of `auto_map` to ignore: the authors' code, of which the HF class is the port.
        sliding_window: whether the HF class reads `use_sliding_window` and its companions.
        rope_theta: base of the rotary embedding where config.json has none.
        rotary_fraction: default of `partial_rotary_factor`, for HF classes that honour it; None: whole heads rotate.
        rotary_interleaved: neighbouring features form a rotary pair, not features half a head apart.
        rope_types: supported values of `rope_type`.
        activation: of the gated MLP.
        norm_offset: norms scale by 1 + weight.
        embedding_scale: of the embedding's output, as a function of hidden_size.
        moe: reads the routed experts.
        latent_attention: reads the latent attention, which replaces the grouped-query attention.
    """

    model_type: str
    hf_class: str
    params: tuple[Param, ...]
    qkv_bias: bool | str
    qk_norm: bool | str
    defaults: Mapping[str, Any]
    reads: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    own_code: tuple[str, ...] = ()
    sliding_window: bool = False
    rope_theta: float = 10000.0
    rotary_fraction: float | None = None
    rotary_interleaved: bool = False
    rope_types: tuple[str, ...] = ("default", "llama3")
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: bool = False
    embedding_scale: Callable[[int], float] | None = None
    moe: Callable[[Fields], MixtureOfExperts] | None = None
    latent_attention: Callable[[Fields], LatentAttention] | None = None
