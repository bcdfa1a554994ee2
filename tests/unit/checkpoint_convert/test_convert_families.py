"""Configs of the families as they are published, and what of them is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert.architecture import LatentAttention, MixtureOfExperts, read_architecture
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families import FAMILIES

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 79,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 20,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 40,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}
GLM4_MOE = SIZES | {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 40,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
}
QWEN3_MOE = SIZES | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "max_window_layers": 4,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
MIXTRAL = SIZES | {"model_type": "mixtral", "num_key_value_heads": 2, "router_aux_loss_coef": 0.02}
MISTRAL = SIZES | {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
GLM = SIZES | {"model_type": "glm", "head_dim": 16, "partial_rotary_factor": 0.5}
GEMMA = SIZES | {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1, "hidden_act": "gelu"}


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_deepseek_v3_as_published(tmp_path: Path) -> None:
    arch = read_architecture(write(tmp_path, DEEPSEEK))
    assert (arch.num_query_groups, arch.head_dim, arch.rotary_interleaved, arch.qk_norm) == (4, 20, False, False)
    assert arch.latent_attention == LatentAttention(24, 20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16)
    assert arch.moe == MixtureOfExperts(
        num_experts=16,
        top_k=4,
        expert_ffn_hidden_size=40,
        shared_ffn_hidden_size=80,
        moe_layers=(False, True, True, True),
        score_function="sigmoid",
        renormalize=True,
        num_groups=4,
        group_top_k=2,
        scaling_factor=2.5,
        expert_bias=True,
    )
    assert arch.rope_scaling == {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    # V2-Lite style queries, and groups that exclude nothing.
    direct = read_architecture(write(tmp_path, DEEPSEEK, q_lora_rank=None, topk_group=4))
    assert direct.latent_attention is not None and direct.latent_attention.q_lora_rank is None
    assert direct.moe is not None and (direct.moe.num_groups, direct.moe.group_top_k) == (None, None)


def test_glm4_moe_as_published(tmp_path: Path) -> None:
    arch = read_architecture(write(tmp_path, GLM4_MOE))
    assert (arch.qkv_bias, arch.qk_norm, arch.rotary_fraction, arch.rotary_interleaved) == (True, True, 0.5, False)
    assert (arch.rope_theta, arch.latent_attention) == (1e6, None)
    assert arch.moe is not None and (arch.moe.num_groups, arch.moe.scaling_factor, arch.moe.top_k) == (None, 2.5, 3)
    plain = read_architecture(
        write(tmp_path, GLM4_MOE, attention_bias=False, use_qk_norm=False, partial_rotary_factor=1)
    )
    assert (plain.qkv_bias, plain.qk_norm, plain.rotary_fraction) == (False, False, 1.0)


@pytest.mark.parametrize(
    ("changes", "moe_layers", "renormalize"),
    [
        ({}, (True, True, True, True), True),
        ({"norm_topk_prob": False}, (True, True, True, True), False),
        ({"mlp_only_layers": [1]}, (True, False, True, True), True),
        ({"decoder_sparse_step": 2}, (False, True, False, True), True),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False), True),
        ({"num_local_experts": 8, "num_experts": None}, (True, True, True, True), True),
    ],
)
def test_qwen3_moe_layers_and_weights(
    tmp_path: Path, changes: dict[str, Any], moe_layers: tuple[bool, ...], renormalize: bool
) -> None:
    moe = read_architecture(write(tmp_path, QWEN3_MOE, **changes)).moe
    assert moe is not None and (moe.moe_layers, moe.renormalize) == (moe_layers, renormalize)
    assert (moe.num_experts, moe.score_function, moe.expert_bias, moe.shared_ffn_hidden_size) == (
        8,
        "softmax",
        False,
        None,
    )


def test_an_absent_norm_topk_prob_is_false_as_in_transformers(tmp_path: Path) -> None:
    config = {name: value for name, value in QWEN3_MOE.items() if name != "norm_topk_prob"}
    moe = read_architecture(write(tmp_path, config)).moe
    assert moe is not None and moe.renormalize is False


def test_mixtral_mistral_glm_and_gemma_as_published(tmp_path: Path) -> None:
    mixtral = read_architecture(write(tmp_path, MIXTRAL))
    assert mixtral.moe is not None and (mixtral.moe.num_experts, mixtral.moe.expert_ffn_hidden_size) == (8, 112)
    assert (mixtral.rope_theta, mixtral.moe.renormalize, mixtral.moe.moe_layers) == (1e6, True, (True,) * 4)
    assert read_architecture(write(tmp_path, MISTRAL)).num_query_groups == 2
    glm = read_architecture(write(tmp_path, GLM))
    assert (glm.rotary_fraction, glm.rotary_interleaved, glm.qkv_bias, glm.norm_eps) == (0.5, True, True, 1.5625e-07)
    gemma = read_architecture(write(tmp_path, GEMMA))
    assert (gemma.activation, gemma.norm_offset, gemma.tie_word_embeddings) == ("gelu_tanh", True, True)
    assert gemma.embedding_scale == pytest.approx(48**0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("block", "mscales"),
    [
        ({"mscale": 0.7, "mscale_all_dim": 0.5}, (0.7, 0.5)),
        ({"mscale": None, "mscale_all_dim": None}, (1.0, 0.0)),
        # transformers takes mscale only together with mscale_all_dim.
        ({"mscale": 0.7, "mscale_all_dim": 0}, (1.0, 0.0)),
    ],
)
def test_yarn_scales_as_transformers_does(tmp_path: Path, block: dict[str, Any], mscales: tuple[float, float]) -> None:
    scaling = read_architecture(write(tmp_path, DEEPSEEK, rope_scaling={**YARN, **block})).rope_scaling
    assert scaling is not None and (scaling["mscale"], scaling["mscale_all_dim"]) == mscales


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (DEEPSEEK, {"topk_method": "group_limited_greedy"}, "topk_method"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob=false with num_experts_per_tok=4"),
        (DEEPSEEK, {"num_experts_per_tok": 1}, "norm_topk_prob=true with num_experts_per_tok=1"),
        (DEEPSEEK, {"num_experts_per_tok": 6}, "topk_group=2"),
        (DEEPSEEK, {"n_group": 3}, "n_group=3"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group=5"),
        (DEEPSEEK, {"num_experts_per_tok": 17, "topk_group": 4}, "n_routed_experts=16"),
        (DEEPSEEK, {"n_group": 16, "topk_group": 2}, "2 groups have 2 experts"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        (DEEPSEEK, {"head_dim": 16}, "head_dim=16"),
        (DEEPSEEK, {"qk_head_dim": 24}, "qk_head_dim=24"),
        (DEEPSEEK, {"qk_rope_head_dim": 7}, "rotates 7 features"),
        (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts=0"),
        (DEEPSEEK, {"n_routed_experts": None}, "n_routed_experts is missing"),
        (DEEPSEEK, {"num_local_experts": 8}, "num_local_experts=8 contradicts n_routed_experts=16"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK, {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        (DEEPSEEK, {"rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor"),
        (DEEPSEEK, {"rope_scaling": {**YARN, "mscale": None}}, "mscale_all_dim but no mscale"),
        (DEEPSEEK, {"rope_scaling": {**YARN, "factor": None}}, "rope_scaling of type yarn lacks factor"),
        (DEEPSEEK, {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        (DEEPSEEK, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'llama3' is not supported"),
        (DEEPSEEK, {"index_topk": 2048}, "index_topk"),
        (GLM4_MOE, {"rope_scaling": YARN}, "yarn"),
        (GLM4_MOE, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (GLM4_MOE, {"partial_rotary_factor": 0.3}, "rotates 4.8 features"),
        (GLM4_MOE, {"rope_parameters": {"partial_rotary_factor": 1.0}}, "contradicting rotary fractions"),
        (GLM4_MOE, {"attention_bias": "yes"}, "attention_bias"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_MOE, {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        (QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts=8"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (QWEN3_MOE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window"),
        (GLM, {"head_dim": 15}, "rotates 7.5 features"),
        (GEMMA, {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (GEMMA, {"hidden_act": "silu"}, "'gelu_pytorch_tanh' or 'gelu'"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA, {"attention_bias": True}, "attention_bias"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"model_type": "gemma2"}, "gemma2' is not supported (logit soft-capping"),
        (GEMMA, {"model_type": "gemma3_text"}, "sandwich norms"),
        (GLM, {"model_type": "glm4"}, "sandwich norms"),
        (QWEN3_MOE, {"model_type": "qwen2_moe"}, "shared_expert_gate"),
        (QWEN3_MOE, {"model_type": "phimoe"}, "'phimoe' is not supported; supported are deepseek_v3, gemma"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_architecture(write(tmp_path, base, **change))
    assert named in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_absent_sliding_window_is_the_default_of_mistral(tmp_path: Path) -> None:
    config = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    with pytest.raises(CheckpointError, match=r"sliding_window=4096 \(the default of MistralForCausalLM"):
        read_architecture(write(tmp_path, config))


@pytest.mark.parametrize("base", [DEEPSEEK, GLM4_MOE, QWEN3_MOE, MIXTRAL, MISTRAL, GLM, GEMMA])
def test_an_unknown_field_is_refused_in_every_family(tmp_path: Path, base: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="logit_scale=0.5 is unknown here"):
        read_architecture(write(tmp_path, base, logit_scale=0.5))


@pytest.mark.parametrize(
    "variant",
    ["deepseek_v3", "deepseek_v3-direct", "gemma-tied", "glm", "glm4_moe", "mistral", "mixtral-tied", "qwen3_moe"],
)
def test_what_transformers_writes_today_is_read(model_folder: Callable[[str], Path], variant: str) -> None:
    arch = read_architecture(model_folder(variant))
    assert (arch.hidden_size, arch.ffn_hidden_size, arch.vocab_size) == (48, 112, 79)
    assert arch.family in FAMILIES
    assert (arch.moe is not None) == variant.startswith(("deepseek", "glm4_moe", "mixtral", "qwen3_moe"))
    if variant == "deepseek_v3":
        assert arch.moe is not None and (arch.moe.num_groups, arch.moe.group_top_k, arch.moe.top_k) == (4, 2, 4)
