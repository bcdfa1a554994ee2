"""Launch checks of parallel layouts against the architecture."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from checkpoint_convert.architecture import LatentAttention, MixtureOfExperts, ModelArchitecture
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.config.validate import check_layout

DENSE = ModelArchitecture(
    family="qwen3",
    num_layers=12,
    hidden_size=48,
    ffn_hidden_size=112,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=16,
    vocab_size=79,
    max_position_embeddings=512,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=True,
    tie_word_embeddings=False,
)
MOE = dataclasses.replace(
    DENSE,
    moe=MixtureOfExperts(
        num_experts=8,
        top_k=2,
        expert_ffn_hidden_size=36,
        shared_ffn_hidden_size=None,
        moe_layers=(True,) * 12,
        score_function="softmax",
        renormalize=True,
        num_groups=None,
        group_top_k=None,
        scaling_factor=1.0,
        expert_bias=False,
    ),
)
LATENT = dataclasses.replace(DENSE, latent_attention=LatentAttention(24, 20, 12, 8, 16))


def config(megatron: dict[str, Any] | None = None, *, processes: int = 8, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": "unused", "dtype": "float32"},
            "data": {"train": ["unused"], "max_prompt_length": 32},
            "rollout": {"prompts_per_step": 16, "n_samples_per_prompt": 4, "max_response_length": 48},
            "parallel": {"nproc_per_node": processes, **parallel},
            "trainer": {"total_steps": 1, "mini_batch_prompts": 16, "max_tokens_per_gpu": 256},
            "megatron": megatron or {},
        }
    )


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}


@pytest.mark.parametrize(
    ("arch", "parallel", "megatron"),
    [
        (DENSE, {**TP2, **PP2, "sequence_parallel": True}, {}),
        (DENSE, {**PP4, "virtual_pipeline_model_parallel_size": 3}, {}),
        (DENSE, PP4, {"num_layers_in_first_pipeline_stage": 3}),
        (DENSE, PP4, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4}),
        (DENSE, PP2, {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 7}),
        (DENSE, PP4, {"pipeline_model_parallel_layout": "Et*3|t*3|t*3|t*3L"}),
        (MOE, {"expert_model_parallel_size": 8}, {}),
        (
            MOE,
            {**TP2, "sequence_parallel": True, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
            {},
        ),
        (MOE, {}, {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}),
        (LATENT, {**TP2, "sequence_parallel": True}, {}),
    ],
)
def test_legal_layouts_pass(arch: ModelArchitecture, parallel: dict[str, Any], megatron: dict[str, Any]) -> None:
    assert check_layout(config(megatron, **parallel), arch) == []


@pytest.mark.parametrize(
    ("arch", "parallel", "megatron", "problem"),
    [
        (
            DENSE,
            {**PP4, "virtual_pipeline_model_parallel_size": 2},
            {},
            "does not divide the 3 layers of a pipeline stage; use one of 1, 3",
        ),
        (DENSE, PP4, {"num_layers_in_first_pipeline_stage": 2}, "10 of 12 layers are left for 3 pipeline stages"),
        (
            DENSE,
            {**PP2, "virtual_pipeline_model_parallel_size": 2},
            {"num_layers_in_first_pipeline_stage": 5},
            "does not divide the layers of every stage",
        ),
        (
            DENSE,
            PP2,
            {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 5},
            "2 of 12 layers are left for 0",
        ),
        (DENSE, {"expert_model_parallel_size": 2}, {}, "the model has no routed experts; remove these keys"),
        (DENSE, {"expert_tensor_parallel_size": 2}, {}, "the model has no routed experts; remove these keys"),
        (DENSE, {"context_parallel_size": 2}, {}, "needs Transformer Engine"),
        (MOE, {**TP2}, {}, "parallel.sequence_parallel must be true for a model with routed experts"),
        (LATENT, {**TP2}, {}, "parallel.sequence_parallel must be true for a model with latent attention"),
        (
            MOE,
            {"expert_tensor_parallel_size": 8},
            {},
            "expert_tensor_parallel_size=8 does not divide an expert's intermediate size 36",
        ),
        (
            MOE,
            {},
            {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
            "global_aux_loss accumulates over steps",
        ),
    ],
)
def test_illegal_layouts_name_the_fix(
    arch: ModelArchitecture, parallel: dict[str, Any], megatron: dict[str, Any], problem: str
) -> None:
    problems = check_layout(config(megatron, **parallel), arch)
    assert len(problems) == 1 and problem in problems[0], problems


def test_experts_must_divide_over_expert_ranks() -> None:
    (problem,) = check_layout(config(processes=3, expert_model_parallel_size=3), MOE)
    assert problem.endswith("=3 does not divide the model's 8 experts; use one of 1, 2, 4, 8")


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"context_parallel_size": 3}, "not a multiple of TP x CP x PP = 3"),
        ({"expert_model_parallel_size": 16}, "not a multiple of expert TP x EP x PP = 16"),
        ({"virtual_pipeline_model_parallel_size": 2}, "needs parallel.pipeline_model_parallel_size above 1"),
        ({"sequence_parallel": True}, "needs parallel.tensor_model_parallel_size above 1"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_with_the_configuration(
    parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**parallel)


def test_shared_memory_does_not_reach_other_hosts() -> None:
    settings = config(nnodes=2).model_dump() | {"weight_sync": {"transport": "tensor"}}
    with pytest.raises(ValidationError, match="transport=tensor shares memory with engines of the same host"):
        RunConfig.model_validate(settings)


def test_optimizer_offload_needs_main_weights_of_its_own() -> None:
    with pytest.raises(ValidationError, match="needs model.dtype=bfloat16"):
        config({"optimizer_cpu_offload": True})


@pytest.mark.parametrize("key", ["optimizer_cpu_offload", "use_precision_aware_optimizer", "overlap_param_gather"])
def test_what_lives_in_the_distributed_optimizer_needs_it(key: str) -> None:
    tree = config().model_dump()
    tree["optim"]["use_distributed_optimizer"] = False
    tree["megatron"] = {key: True}
    with pytest.raises(ValidationError, match=f"megatron.{key} needs optim.use_distributed_optimizer=true"):
        RunConfig.model_validate(tree)


def test_context_parallelism_spreads_a_micro_batch_and_aligns_its_sequences() -> None:
    run = config(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2)
    assert run.max_micro_batch_tokens == 512
    assert run.parallel.sequence_alignment == 4 and run.parallel.token_alignment == 8
    assert run.parallel.data_parallel_size == 2
