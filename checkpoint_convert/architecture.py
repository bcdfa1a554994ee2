"""What a Megatron builder and the weight mapping must know of a model, read from a HF config.json. Imports no torch.

The family's table (`families`) says how its config.json is read; fields that cannot be honoured are refused by name
(`refusals`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checkpoint_convert.config_fields import Fields, read_config
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.table import Condition, Dim, Family
from checkpoint_convert.parts import LatentAttention, MixtureOfExperts
from checkpoint_convert.refusals import UNSUPPORTED, refusals
from checkpoint_convert.rope import read_rope

__all__ = ["LatentAttention", "MixtureOfExperts", "ModelArchitecture", "padded_vocab_size", "read_architecture"]


@dataclass(frozen=True)
class ModelArchitecture:
    """A decoder. Sizes are the checkpoint's own, without any padding.

    Attributes:
        family: key of `families.FAMILIES`.
        ffn_hidden_size: width of a dense MLP.
        num_query_groups: key/value heads.
        head_dim: width of one query or key head; heads x head_dim need not be hidden_size. With latent attention the
            rotary part is included.
        rope_theta: base of the rotary embedding.
        rope_scaling: None, or `{"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings"}`, or (latent attention only) `{"rope_type": "yarn", "factor",
            "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}`, all floats with
            the meaning that Megatron's `YarnRotaryEmbedding` gives them.
        qkv_bias: query, key and value projections have a bias (no other projection has).
        qk_norm: RMSNorm over head_dim on queries and keys, before the rotary embedding. Latent attention normalises its
            latents, always, and has no qk_norm.
        rotary_fraction: share of a head, from its start, that is rotated.
        rotary_interleaved: neighbouring features form a rotary pair, not features half the rotated width apart. Latent
            attention always rotates neighbours and leaves this False, as Megatron does.
        activation: of the gated MLP.
        norm_offset: norms scale by 1 + weight (Megatron `layernorm_zero_centered_gamma`).
        embedding_scale: factor on the embedding's output, before the first layer.
        latent_attention, moe: see there; None without.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: bool = False
    embedding_scale: float | None = None
    latent_attention: LatentAttention | None = None
    moe: MixtureOfExperts | None = None

    @property
    def dims(self) -> Mapping[Dim, int]:
        """Numbers for the dimension names of the family tables; those of parts that the model lacks are absent."""
        heads = self.num_attention_heads
        dims: dict[Dim, int] = {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "gate_and_up": 2 * self.ffn_hidden_size,
            "query": heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
        }
        if self.moe is not None:
            dims |= {"experts": self.moe.num_experts, "expert_ffn": self.moe.expert_ffn_hidden_size}
            if self.moe.shared_ffn_hidden_size is not None:
                dims["shared_ffn"] = self.moe.shared_ffn_hidden_size
        latent = self.latent_attention
        if latent is not None:
            if latent.q_lora_rank is not None:
                dims["query_latent"] = latent.q_lora_rank
            dims |= {
                "kv_latent": latent.kv_lora_rank,
                "kv_latent_and_rope": latent.kv_lora_rank + latent.qk_rope_head_dim,
                "latent_query": heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim),
                "latent_key_value": heads * (latent.qk_nope_head_dim + latent.v_head_dim),
                "latent_value": heads * latent.v_head_dim,
            }
        return dims

    def conditions(self, layer: int | None) -> frozenset[Condition]:
        """What holds for the model and, if given, its layer: the conditions of the family tables."""
        latent = self.latent_attention
        held: set[Condition] = {"tied" if self.tie_word_embeddings else "untied"}
        if self.qkv_bias:
            held.add("qkv_bias")
        if self.qk_norm:
            held.add("qk_norm")
        if latent is not None:
            held.add("direct_query" if latent.q_lora_rank is None else "query_latent")
        if layer is not None:
            held.add("experts" if self.moe is not None and self.moe.moe_layers[layer] else "dense_mlp")
        return frozenset(held)


def padded_vocab_size(vocab: int, tp: int) -> int:
    """Smallest multiple of `tp` that holds `vocab` rows.

    The rows beyond `vocab` are zeros, so their logits are 0 and not minus infinity: whoever takes a softmax over the
    padded vocabulary must mask them.
    """
    return math.ceil(vocab / tp) * tp


def read_architecture(model_dir: Path | str) -> ModelArchitecture:
    """Read `<model_dir>/config.json`, in the spelling of transformers 5 (`rope_parameters`) or older (`rope_theta`, `rope_scaling`).

    Raises:
        CheckpointError: no such folder or file, not JSON, an unknown family, a missing or impossible value, or fields that
            this package does not handle; all unhandled fields are named at once.
    """
    path, config = read_config(Path(model_dir))
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        reason = f" ({UNSUPPORTED[model_type]})" if model_type in UNSUPPORTED else ""
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not supported{reason}; supported are {', '.join(sorted(FAMILIES))}"
        )
    config = _without_aliases(path, config, family)
    found = refusals(config, family)
    if found:
        raise CheckpointError(f"{path}: cannot reproduce this model: " + "; ".join(found))

    fields = Fields(path, {**family.defaults, **config})
    hidden, positions = fields.integer("hidden_size"), fields.integer("max_position_embeddings")
    theta, fraction, scaling = read_rope(path, config, family, positions)
    latent = family.latent_attention(fields) if family.latent_attention else None
    heads, groups, head_dim = _heads(fields, latent)
    rotated = head_dim * fraction if latent is None else latent.qk_rope_head_dim
    if rotated % 2:
        raise CheckpointError(
            f"{path}: head_dim={head_dim} with partial_rotary_factor={fraction} rotates {rotated:g} features; the rotary embedding needs pairs"
        )
    return ModelArchitecture(
        family=family.model_type,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=fields.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=positions,
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=_switch(fields, family.qkv_bias),
        qk_norm=_switch(fields, family.qk_norm),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        rotary_fraction=fraction,
        rotary_interleaved=family.rotary_interleaved,
        activation=family.activation,
        norm_offset=family.norm_offset,
        embedding_scale=family.embedding_scale(hidden) if family.embedding_scale else None,
        latent_attention=latent,
        moe=family.moe(fields) if family.moe else None,
    )


def _without_aliases(path: Path, config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Rename fields that stand under their second name."""
    renamed = dict(config)
    for alias, name in family.aliases.items():
        value = renamed.pop(alias, None)
        if value is None:
            continue
        if renamed.get(name) not in (None, value):
            raise CheckpointError(f"{path}: {alias}={value!r} contradicts {name}={renamed[name]!r}; keep one")
        renamed[name] = value
    return renamed


def _switch(fields: Fields, switch: bool | str) -> bool:
    return fields.boolean(switch) if isinstance(switch, str) else switch


def _heads(fields: Fields, latent: LatentAttention | None) -> tuple[int, int, int]:
    """Heads, key/value heads, width of a head."""
    path = fields.path
    heads = fields.integer("num_attention_heads")
    groups = fields.integer("num_key_value_heads") if fields.given("num_key_value_heads") else heads
    if latent is not None:
        if groups != heads:
            raise CheckpointError(
                f"{path}: num_key_value_heads={groups}: latent attention has as many as num_attention_heads={heads}"
            )
        return heads, heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    if heads % groups:
        raise CheckpointError(f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    if fields.given("head_dim"):
        return heads, groups, fields.integer("head_dim")
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        raise CheckpointError(
            f"{path}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and head_dim is not given"
        )
    return heads, groups, hidden // heads
