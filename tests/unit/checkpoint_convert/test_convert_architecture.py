"""Reading config.json: both spellings, defaults of the HF classes, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert.architecture import padded_vocab_size, read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families import FAMILIES

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 112,
    "max_position_embeddings": 512,
    "max_window_layers": 28,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 79,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 79,
}
LLAMA3_FACTORS = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_published_qwen2_config_is_read(tmp_path: Path) -> None:
    arch = read_architecture(write(tmp_path, QWEN2))
    assert (arch.family, arch.num_layers, arch.hidden_size, arch.ffn_hidden_size) == ("qwen2", 3, 48, 112)
    assert (arch.num_attention_heads, arch.num_query_groups, arch.head_dim, arch.vocab_size) == (4, 2, 12, 79)
    assert (arch.norm_eps, arch.rope_theta, arch.rope_scaling) == (1e-5, 1e6, None)
    assert (arch.qkv_bias, arch.qk_norm, arch.tie_word_embeddings) == (True, False, True)


def test_absent_fields_take_the_defaults_of_the_hf_class(tmp_path: Path) -> None:
    arch = read_architecture(write(tmp_path, LLAMA))
    assert (arch.num_query_groups, arch.head_dim, arch.tie_word_embeddings) == (4, 12, False)
    assert (arch.norm_eps, arch.rope_theta, arch.max_position_embeddings) == (1e-6, 10000.0, 2048)
    qwen3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    arch = read_architecture(write(tmp_path, qwen3))
    assert (arch.head_dim, arch.qk_norm, arch.qkv_bias) == (128, True, False)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_installed_transformers(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class, family = CONFIG_MAPPING[model_type], FAMILIES[model_type]
    for name, value in family.defaults.items():
        assert getattr(config_class, name, None) == value, name
    assert config_class.default_theta == family.rope_theta
    rope = config_class().rope_parameters
    assert rope["rope_theta"] == family.rope_theta
    assert rope.get("partial_rotary_factor") == family.rotary_fraction


def test_old_and_new_rotary_spelling_give_the_same_architecture(tmp_path: Path) -> None:
    old = read_architecture(write(tmp_path, LLAMA, rope_theta=500000.0))
    new = read_architecture(write(tmp_path, LLAMA, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}))
    both = read_architecture(
        write(tmp_path, LLAMA, rope_theta=500000, rope_scaling=None, rope_parameters={"rope_theta": 500000.0})
    )
    assert old == new == both
    assert old.rope_theta == 500000.0


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FACTORS}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_FACTORS}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_FACTORS}},
    ],
)
def test_llama3_rope_scaling_is_read_in_each_spelling(tmp_path: Path, spelling: dict[str, Any]) -> None:
    arch = read_architecture(write(tmp_path, LLAMA, **spelling))
    assert arch.rope_theta == 5e5
    assert arch.rope_scaling == {"rope_type": "llama3", **LLAMA3_FACTORS}


def test_what_transformers_writes_today_is_read(model_folder: Any) -> None:
    for variant in ("llama", "llama-tied", "qwen2", "qwen3-tied"):
        arch = read_architecture(model_folder(variant))
        assert arch.tie_word_embeddings == variant.endswith("tied")
        assert (arch.hidden_size, arch.ffn_hidden_size, arch.vocab_size) == (48, 112, 79)
        assert arch.head_dim == (12 if variant == "qwen2" else 16)


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        (QWEN2, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        (QWEN2, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (QWEN2, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (QWEN2, {"num_experts": 8}, "num_experts"),
        (QWEN2, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN2, {"architectures": ["Qwen2ForSequenceClassification"]}, "architectures"),
        (QWEN2, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        (QWEN2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (QWEN2, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        (QWEN2, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "longrope"}}, "longrope"),
        (QWEN2, {"rope_parameters": {"rope_theta": 1e4}}, "contradicting"),
        (QWEN2, {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        (QWEN2, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
        (QWEN2, {"rope_parameters": {"rope_theta": 1e6, "mscale": 0.7}}, "mscale"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window"),
        (LLAMA, {"model_type": "gemma2"}, "gemma2"),
        (LLAMA, {"model_type": None}, "model_type"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": "48"}, "hidden_size='48'"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (LLAMA, {"hidden_size": 50}, "hidden_size=50"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        (LLAMA, {"head_dim": 15}, "head_dim=15"),
        (LLAMA, {"rope_theta": "10000"}, "rope_theta"),
        (LLAMA, {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_architecture(write(tmp_path, base, **change))
    assert named in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_all_unhandled_fields_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="(?s)hidden_act.*embedding_multiplier.*logits_scaling"):
        read_architecture(write(tmp_path, LLAMA, hidden_act="relu", embedding_multiplier=12.0, logits_scaling=8.0))


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": None},
        {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "max_window_layers": 0},
        {"rope_scaling": None, "unsloth_fixed": True, "_name_or_path": "x", "num_experts": 0, "softcap": None},
    ],
)
def test_switched_off_or_harmless_fields_are_accepted(tmp_path: Path, change: dict[str, Any]) -> None:
    assert read_architecture(write(tmp_path, QWEN2, **change)) == read_architecture(write(tmp_path, QWEN2))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="config.json: not found"):
        read_architecture(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json.*JSON"):
            read_architecture(tmp_path)


def test_padded_vocabulary_is_the_smallest_multiple() -> None:
    assert [padded_vocab_size(79, tp) for tp in (1, 2, 3, 4, 79, 100)] == [79, 80, 81, 80, 79, 100]


def test_reading_an_architecture_imports_no_torch() -> None:
    code = "import sys, checkpoint_convert.architecture; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
