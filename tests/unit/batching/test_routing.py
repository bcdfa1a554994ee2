"""The engines' expert choices beside packed tokens, and the launch checks of the option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_convert.architecture import read_architecture
from dapo_megatron.batching import pack
from dapo_megatron.batching.context_parallel import context_shard
from dapo_megatron.batching.routing import pack_routed_experts
from dapo_megatron.config import ConfigError, load_config
from dapo_megatron.config.load import service_settings
from dapo_megatron.config.routing import router_replay_problems, routing_shape
from rollout_service.config import RoutingShape
from tests.config_files import write_config, write_model_folder

SHAPE = RoutingShape(num_layers=3, moe_layers=(0, 2), num_experts=5, top_k=2)
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}


def choices(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(5)[:2] for _ in range(rows * 2)]).reshape(rows, 2, 2).astype(np.uint8)


def sequences(*lengths: tuple[int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.ones(p, np.int32), np.ones(n, np.int32)) for p, n in lengths]


def test_choices_lie_beside_their_tokens_and_the_rest_goes_round_the_experts() -> None:
    packed = pack(sequences((2, 3), (1, 1)), pad_to_multiple=4, sequence_multiple=2)
    assert packed.cu_seqlens.tolist() == [0, 6, 8]
    first, second = choices(4, 1), choices(1, 2)
    got = pack_routed_experts([first, second], packed.cu_seqlens, SHAPE)
    assert (got.shape, got.dtype) == ((8, 2, 2), torch.uint8)
    np.testing.assert_array_equal(got[:4].numpy(), first)
    np.testing.assert_array_equal(got[6:7].numpy(), second)
    # Tokens 4 (last of its sequence), 5 (padding) and 7 (last again): two experts each, in turn.
    assert got[[4, 5, 7]].tolist() == [[[3, 4]] * 2, [[0, 1]] * 2, [[4, 0]] * 2]
    assert (got[..., 0] != got[..., 1]).all()


def test_a_rank_without_samples_routes_its_padding() -> None:
    packed = pack([], pad_to_multiple=4)
    got = pack_routed_experts([], packed.cu_seqlens, SHAPE)
    assert got[:, 0].tolist() == [[0, 1], [2, 3], [4, 0], [1, 2]]


@pytest.mark.parametrize("shape", [(5, 2, 2), (4, 1, 2), (4, 2, 3)])
def test_choices_that_do_not_fit_the_tokens_or_the_model_are_refused(shape: tuple[int, ...]) -> None:
    packed = pack(sequences((2, 3)))
    with pytest.raises(ValueError, match=rf"sequence 0 of 5 packed tokens: .* \({', '.join(map(str, shape))}\)"):
        pack_routed_experts([np.zeros(shape, np.uint8)], packed.cu_seqlens, SHAPE)


def test_a_context_parallel_rank_finds_the_rows_of_its_tokens() -> None:
    packed = pack(sequences((2, 5), (1, 3)), pad_to_multiple=4, sequence_multiple=4)
    tokens = torch.arange(packed.tokens.shape[1])[None]
    shards = [context_shard(replace(packed, tokens=tokens), 2, rank) for rank in range(2)]
    assert all(torch.equal(shard.tokens[0], shard.index) for shard in shards)
    assert sorted(torch.cat([shard.index for shard in shards]).tolist()) == list(range(12))


def config_with(tmp_path: Path, *overrides: str, **model: Any) -> Any:
    path = write_config(tmp_path)
    folder = write_model_folder(tmp_path / "other", **model)
    return load_config(path, [f"model.path={folder}", "rollout.router_replay=true", *overrides])


def problems(config: Any) -> list[str]:
    return router_replay_problems(config, read_architecture(config.model.path))


def test_the_service_is_told_the_models_routing(tmp_path: Path) -> None:
    config = config_with(tmp_path, **EXPERTS)
    assert problems(config) == []
    settings = service_settings(config, tmp_path)
    assert settings.routing == RoutingShape(num_layers=4, moe_layers=(0, 2, 3), num_experts=8, top_k=3)
    assert (
        service_settings(
            config.model_copy(update={"rollout": config.rollout.model_copy(update={"router_replay": False})}), tmp_path
        ).routing
        is None
    )


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    assert problems(config) == [
        "rollout.router_replay=true, but qwen3 has no routed experts to choose from; set it to false"
    ]
    assert routing_shape(read_architecture(config.model.path)) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("megatron.moe_router_fusion=true", "megatron.moe_router_fusion cannot go with"),
        ("megatron.moe_expert_capacity_factor=1.5", "a full expert drops tokens"),
    ],
)
def test_settings_that_would_route_otherwise_are_refused(tmp_path: Path, override: str, message: str) -> None:
    (problem,) = problems(config_with(tmp_path, override, **EXPERTS))
    assert message in problem


@pytest.mark.parametrize("key", ["megatron.moe_enable_routing_replay", "sglang.enable_return_routed_experts"])
def test_the_two_sides_are_switched_together(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: set rollout\.router_replay instead"):
        load_config(write_config(tmp_path), [f"{key}=true"])
