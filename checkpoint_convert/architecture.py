"""What a Megatron builder and the weight mapping must know of a model, read from a HF config.json.

A field that changes the model's outputs and that this package cannot express is refused by name: a model that loads
but computes something else is the worst outcome. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families import FAMILIES
from checkpoint_convert.families.table import Dim, Family

# Fields that this module reads, for every family.
_READ = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types", "auto_map",
}  # fmt: skip

# Fields that say nothing about the function that the model computes (token ids, bookkeeping, training-time noise that
# the trainer sets itself, old generation settings). `attention_dropout` belongs here: the trainer uses no dropout.
_HARMLESS = {
    "dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache", "initializer_range", "pretraining_tp",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "unk_token_id", "decoder_start_token_id", "tokenizer_class", "attn_implementation", "experts_implementation", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "prefix", "torchscript", "use_bfloat16", "keys_to_ignore_at_inference",
    "is_llama_config", "transformers.js_config", "license", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
_HARMLESS_PREFIXES = ("_", "unsloth")
_SLIDING_WINDOW = {"use_sliding_window", "sliding_window", "max_window_layers"}
_LLAMA3_FACTORS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ModelArchitecture:
    """A dense decoder. Sizes are the checkpoint's own, without any padding.

    Attributes:
        family: key of `families.FAMILIES`.
        num_query_groups: key/value heads.
        head_dim: width of one head; heads x head_dim need not be hidden_size.
        rope_theta: base of the rotary embedding.
        rope_scaling: None, or `{"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings"}`.
        qkv_bias: query, key and value projections have a bias (no other projection has).
        qk_norm: RMSNorm over head_dim on queries and keys, before the rotary embedding.
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

    @property
    def dims(self) -> Mapping[Dim, int]:
        """Numbers for the dimension names of the family tables."""
        return {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "query": self.num_attention_heads * self.head_dim,
            "kv": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
        }


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
    path, config = _read_config(Path(model_dir))
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    refusals = _refusals(config, family)
    if refusals:
        raise CheckpointError(f"{path}: cannot reproduce this model: " + "; ".join(refusals))

    reader = _Fields(path, {**family.defaults, **config})
    heads = reader.integer("num_attention_heads")
    hidden = reader.integer("hidden_size")
    groups = heads if reader.config["num_key_value_heads"] is None else reader.integer("num_key_value_heads")
    if heads % groups:
        raise CheckpointError(f"{path}: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
    if reader.config["head_dim"] is None:
        if hidden % heads:
            raise CheckpointError(
                f"{path}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and head_dim is not given"
            )
        head_dim = hidden // heads
    else:
        head_dim = reader.integer("head_dim")
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim={head_dim} is odd; the rotary embedding needs pairs")
    rope_theta, rope_scaling = _rope(path, config, reader.integer("max_position_embeddings"))
    return ModelArchitecture(
        family=family.model_type,
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=reader.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        norm_eps=reader.number("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
    )


def _read_config(model_dir: Path) -> tuple[Path, dict[str, Any]]:
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise CheckpointError(
            f"{model_dir}: no such folder; give a Hugging Face model folder with config.json and safetensors"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found; {model_dir} is not a Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return path, config


class _Fields:
    """Typed access to config values; errors name file and field."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    def _get(self, name: str) -> Any:
        if self.config.get(name) is None:
            raise CheckpointError(f"{self.path}: {name} is missing")
        return self.config[name]

    def integer(self, name: str) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.path}: {name}={value!r} must be a positive integer")
        return value

    def number(self, name: str) -> float:
        return _positive(self.path, name, self._get(name))

    def boolean(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name}={value!r} must be true or false")
        return value


def _positive(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise CheckpointError(f"{path}: {name}={value!r} must be a positive number")
    return float(value)


def _refusals(config: dict[str, Any], family: Family) -> list[str]:
    """Every field of `config` that cannot be honoured, each with the reason."""
    found: list[str] = []
    names = config.get("architectures") or [family.hf_class]
    if names != [family.hf_class]:
        found.append(f"architectures={names!r}, only {family.hf_class} is supported")
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        found.append(f"partial_rotary_factor={config['partial_rotary_factor']!r}, only whole heads are rotated (1.0)")
    for name, value in family.required.items():
        if config.get(name) not in (None, value):
            found.append(f"{name}={config[name]!r}, only {value!r} is supported for {family.model_type}")
    custom = [key for key in config.get("auto_map") or {} if not str(key).startswith("AutoTokenizer")]
    if custom:
        found.append(f"auto_map names the model's own code ({', '.join(custom)}), which is not run")
    if family.sliding_window:
        found += _sliding_window_refusals(config)
    other_layers = sorted({str(kind) for kind in config.get("layer_types") or [] if kind != "full_attention"})
    if other_layers:
        found.append(f"layer_types contains {', '.join(other_layers)}, only full_attention is supported")
    handled = _READ | _HARMLESS | set(family.required) | (_SLIDING_WINDOW if family.sliding_window else set())
    for name, value in config.items():
        # null, false, 0 and empty values switch a feature off.
        if name not in handled and not name.startswith(_HARMLESS_PREFIXES) and value:
            found.append(
                f"{name}={value!r} is unknown here (remove the field if it does not change the model's outputs)"
            )
    return found


def _sliding_window_refusals(config: dict[str, Any]) -> list[str]:
    # HF gives layer i the window if use_sliding_window and i >= max_window_layers; explicit layer_types win.
    in_use = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    if not in_use or config.get("layer_types"):
        return []
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers", 0)
    if isinstance(first, int) and isinstance(layers, int) and first >= layers:
        return []
    return [
        f"use_sliding_window=true gives layers from max_window_layers={first} on a sliding window, which is not supported"
    ]


def _rope(path: Path, config: dict[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Return the rotary base and, for Llama 3.1 style scaling, its factors."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, block in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
            raise CheckpointError(f"{path}: {name} must be one flat object; settings per layer type are not supported")
    thetas = {"rope_parameters.rope_theta": new.get("rope_theta"), "rope_scaling.rope_theta": old.get("rope_theta")}
    thetas["rope_theta"] = config.get("rope_theta")
    given = {name: _positive(path, name, value) for name, value in thetas.items() if value is not None}
    if len(set(given.values())) > 1:
        raise CheckpointError(f"{path}: contradicting rotary bases {given}; keep one")
    theta = next(iter(given.values()), 10000.0)  # transformers' default for all three families

    kinds = {
        name: block.get("rope_type", block.get("type", "default"))
        for name, block in (("rope_parameters", new), ("rope_scaling", old))
        if block
    }
    scaled = {name: kind for name, kind in kinds.items() if kind != "default"}
    for name, kind in scaled.items():
        if kind != "llama3":
            raise CheckpointError(
                f"{path}: {name}.rope_type={kind!r} is not supported; supported are 'default' and 'llama3'"
            )
    for name, block in (("rope_parameters", new), ("rope_scaling", old)):
        unknown = set(block) - {
            "rope_type",
            "type",
            "rope_theta",
            "partial_rotary_factor",
            *(_LLAMA3_FACTORS if name in scaled else ()),
        }
        unknown = {key for key in unknown if block[key] is not None}
        if unknown:
            raise CheckpointError(f"{path}: {name} has unsupported fields: {', '.join(sorted(unknown))}")
        if block.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise CheckpointError(
                f"{path}: {name}.partial_rotary_factor={block['partial_rotary_factor']!r}: only whole heads are rotated (1.0)"
            )
    if not scaled:
        return theta, None
    factors: dict[str, dict[str, float]] = {}
    for name in scaled:
        block = {"original_max_position_embeddings": max_positions, **(new if name == "rope_parameters" else old)}
        missing = [key for key in _LLAMA3_FACTORS if block.get(key) is None]
        if missing:
            raise CheckpointError(f"{path}: {name} of type llama3 lacks {', '.join(missing)}")
        factors[name] = {key: _positive(path, f"{name}.{key}", block[key]) for key in _LLAMA3_FACTORS}
    values = list(factors.values())
    if values[0] != values[-1]:
        raise CheckpointError(f"{path}: rope_parameters and rope_scaling contradict each other; keep one")
    if values[0]["high_freq_factor"] <= values[0]["low_freq_factor"]:
        raise CheckpointError(f"{path}: rope scaling needs high_freq_factor above low_freq_factor")
    return theta, {"rope_type": "llama3", **values[0]}
