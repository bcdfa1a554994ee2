"""The verbatim blocks against the installed packages' own definitions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_megatron.config import ConfigError, load_config
from dapo_megatron.config.passthrough import megatron_fields, sglang_fields
from tests.config_files import write_config


def problems_of(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(folder), overrides)
    return caught.value.problems


def test_fields_are_found_in_the_installed_sources() -> None:
    assert {"recompute_granularity", "adam_eps", "overlap_grad_reduce", "microbatch_group_size_per_vp_stage"} <= set(
        megatron_fields()
    )
    assert {"mem_fraction_static", "schedule_conservativeness", "attention_backend", "tp_size"} <= set(sglang_fields())


@pytest.mark.parametrize(
    "override",
    [
        "megatron.recompute_granularity=full",
        "megatron.recompute_granularity=null",
        "megatron.num_layers_in_first_pipeline_stage=1",
        "megatron.overlap_grad_reduce=true",
        "megatron.initial_loss_scale=1e5",
        "megatron.recompute_modules=[core_attn, mlp]",
        "sglang.mem_fraction_static=0.5",
        "sglang.max_total_tokens=1024",
        "sglang.attention_backend=torch_native",
        "sglang.sleep_on_idle=true",
    ],
)
def test_fields_of_the_right_type_pass(tmp_path: Path, override: str) -> None:
    load_config(write_config(tmp_path), [override])


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("megatron.recompute_granularty=full", "no such field; nearest: recompute_granularity"),
        ("megatron.recompute_granularity=some", "wants Optional[Literal['full', 'selective']]"),
        (
            "megatron.overlap_grad_reduce=yes",
            "megatron.overlap_grad_reduce: 'yes' (str) given, Megatron-Core wants bool",
        ),
        ("megatron.overlap_grad_reduce=1", "wants bool"),
        ("megatron.initial_loss_scale='1e5'", "'1e5' (str) given, Megatron-Core wants float"),
        ("megatron.attention_backend=flash", "wants AttnBackend"),
        ("megatron.adam_eps=1e-8", "megatron.adam_eps: set optim.adam_eps instead"),
        ("megatron.tensor_model_parallel_size=2", "set parallel.tensor_model_parallel_size instead"),
        ("megatron.hidden_size=8", "config.json decides it"),
        ("megatron.window_size=[128, 0]", "config.json decides it"),
        ("megatron.calculate_per_token_loss=false", "fixed by the trainer"),
        ("megatron.hidden_dropout=0.1", "dropout would make the old log-probs differ"),
        ("sglang.mem_fraction=0.5", "no such field"),
        ("sglang.mem-fraction-static=0.5", "no such field; nearest: mem_fraction_static"),
        ("sglang.mem_fraction_static=half", "wants Optional[float]"),
        ("sglang.tp_size=2", "set rollout.engine.tp_size instead"),
        ("sglang.port=3000", "each engine gets a free port"),
    ],
)
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, override: str, problem: str) -> None:
    problems = problems_of(tmp_path, override)
    assert len(problems) == 1
    assert problem in problems[0]


def test_the_block_of_a_server_in_another_interpreter_is_left_to_that_server(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["sglang.newer_flag=3", "rollout.engine.python=other-python"])
    assert config.sglang == {"newer_flag": 3}
