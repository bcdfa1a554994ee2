"""What a router may learn beside the policy gradient: auxiliary losses and the selection bias, on real Megatron ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.actor_ranks import Layout, make_groups, run_layouts
from tests.integration.test_actor_layouts import sequences
from tests.ranks import run_ranks
from tests.toy_models import VOCAB_SIZE, load_model, make_model

BALANCE, Z, RATE, UPDATES = 0.3, 0.05, 0.01, 2
# One micro-batch of all tokens, split over four ranks.
WHOLE = {"tp": 4, "sequence_parallel": True, "ep": 2, "etp": 1, "max_tokens": 2048}
PLAIN = Layout(**WHOLE)
AUXILIARY = Layout(
    **WHOLE,
    label="aux",
    megatron={
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": BALANCE,
        "moe_z_loss_coeff": Z,
    },
)
BIAS = Layout(ep=2, label="bias", megatron={"moe_router_bias_update_rate": RATE})


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    return make_groups(VOCAB_SIZE, 4, 3, seed=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "moe": make_model(root / "moe", "qwen3_moe", seed=3, num_hidden_layers=2, mlp_only_layers=[]),
        "deepseek": make_model(root / "deepseek", "deepseek_v3", seed=4),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module", autouse=True)
def ranks(models: dict[str, Path], groups: list[dict[str, Any]], saved: Path) -> list[dict[str, Any]]:
    """Results of each rank; rank 0 writes gradients and weights to `saved`."""
    cases = [(str(models["moe"]), PLAIN), (str(models["moe"]), AUXILIARY), (str(models["deepseek"]), BIAS)]
    return run_ranks(4, run_layouts, cases, groups, 3, UPDATES, str(saved), timeout_s=200)


def test_auxiliary_losses_add_their_mean_over_tokens_to_the_gradient(saved, models, groups) -> None:
    plain = load_file(saved / f"moe@{PLAIN.name}.grads.safetensors")
    auxiliary = load_file(saved / f"moe@{AUXILIARY.name}.grads.safetensors")
    # The whole micro-batch is routed, padding to a multiple of the ranks included.
    flat = [[*p, *r] for p, r in sequences(groups)]
    model = load_model(models["moe"]).double()
    expected = auxiliary_gradients(model, flat, padding=-sum(map(len, flat)) % 4)
    for name, gradient in expected.items():
        added = auxiliary[name].double() - plain[name].double()
        assert gradient.norm() > 0
        assert (added - gradient).norm() < 2e-4 * gradient.norm(), name


def test_selection_bias_moves_by_the_rate_against_the_load(saved, models) -> None:
    before = load_file(models["deepseek"] / "model.safetensors")
    after = load_file(saved / f"deepseek@{BIAS.name}.weights.safetensors")
    names = [name for name in before if name.endswith("e_score_correction_bias")]
    assert names
    for name in names:
        steps = (after[name] - before[name].float()) / RATE
        # The gradients are computed once more before the updates.
        assert torch.allclose(steps, steps.round(), atol=1e-3), name
        assert 0 < steps.abs().max() <= UPDATES + 2, name
        assert steps.min() < 0 < steps.max(), name


def test_a_skipped_update_leaves_the_selection_bias_alone(ranks) -> None:
    assert [rank[f"deepseek/{BIAS.name}"]["skipped_update_changed"] for rank in ranks] == [[]] * 4


def auxiliary_gradients(model: Any, flat: list[list[int]], padding: int) -> dict[str, torch.Tensor]:
    """Gradients, by name, that the router's losses add to the router weights, from their definitions.

    Load balancing (Switch, arXiv 2101.03961, for top-k): E / k x sum over experts of (share of tokens x mean probability);
    z-loss (ST-MoE, arXiv 2202.08906): mean of squared logsumexp. Summed over layers.
    """
    flat = [*flat[:-1], [*flat[-1], *[0] * padding]]
    logits: list[list[torch.Tensor]] = []
    for ids in flat:
        outputs = model(torch.tensor([ids]), output_router_logits=True)
        logits.append([layer.reshape(-1, layer.shape[-1]) for layer in outputs.router_logits])
    total = torch.zeros((), dtype=torch.float64)
    top_k = model.config.num_experts_per_tok
    for layer in range(len(logits[0])):
        scores = torch.cat([sequence[layer] for sequence in logits]).double()
        experts = scores.shape[-1]
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(top_k, dim=-1).indices, 1.0)
        share, probability = chosen.mean(0) / top_k, scores.softmax(-1).mean(0)
        total = total + BALANCE * experts * (share * probability).sum() + Z * scores.logsumexp(-1).square().mean()
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight")}
