"""Real Megatron actors in several layouts against Hugging Face transformers and a float64 reference of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.actor_ranks import ALGORITHMS, TRUNCATED_LENGTH, Layout, make_groups, run_layouts
from tests.ranks import run_ranks
from tests.toy_models import VOCAB_SIZE, hf_logprobs, load_model, make_model

GROUPS, GROUP_SIZE, UPDATES = 4, 3, 3
LAYOUTS = [
    Layout(),
    Layout(max_tokens=90),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
    Layout(algorithm="options"),
    Layout(tp=2, pp=2, max_tokens=90, algorithm="options"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [
        make_model(root / "qwen3-untied", "qwen3", tie=False, seed=1),
        make_model(root / "qwen2-tied", "qwen2", tie=True, seed=2),
        make_model(root / "llama-tied", "llama", tie=True, seed=3, vocab_size=VOCAB_SIZE + 3),
    ]


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    return make_groups(VOCAB_SIZE, GROUPS, GROUP_SIZE, seed=7)


@pytest.fixture(scope="module")
def export_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def runs(models: list[Path], groups: list[dict[str, Any]], export_dir: Path) -> list[dict[str, Any]]:
    """Results of all cases on each of four ranks; four processes serve every layout."""
    # Every layout on the first family; the others, which differ in their mapping, in the layouts that split it.
    cases = [(str(models[0]), layout) for layout in LAYOUTS]
    cases += [(str(model), layout) for model in models[1:] for layout in (Layout(), Layout(tp=2, pp=2), Layout(tp=4))]
    return run_ranks(4, run_layouts, cases, groups, GROUP_SIZE, UPDATES, str(export_dir), timeout_s=280)


def case_names(runs: list[dict[str, Any]]) -> list[str]:
    return sorted(runs[0])


def sequences(groups: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    flat = []
    for group in groups:
        packed = group["packed"]
        for start, end in zip(packed["offsets"][:-1], packed["offsets"][1:], strict=True):
            flat.append((packed["prompt_ids"].tolist(), packed["response_ids"][start:end].tolist()))
    return flat


def test_logprobs_equal_transformers_in_every_layout(runs, models, groups) -> None:
    for model_dir in models:
        model = load_model(model_dir)
        reference = [hf_logprobs(model, [*p, *r])[len(p) - 1 :].numpy() for p, r in sequences(groups)]
        for case in (c for c in case_names(runs) if c.startswith(model_dir.name + "/")):
            seen: dict[int, np.ndarray] = {}
            for rank in runs:
                seen |= rank[case]["logprobs"]
            assert sorted(seen) == list(range(GROUPS * GROUP_SIZE)), f"{case}: samples missing or doubled"
            worst = max(np.abs(seen[i] - reference[i]).max() for i in seen)
            assert worst < 1e-5, f"{case}: {worst}"


def test_loss_and_gradient_norm_equal_a_float64_reference_in_every_layout(runs, models, groups) -> None:
    for model_dir in models:
        loss, grad_norm, scale = float64_loss_and_gradient_norm(model_dir, groups)
        for case in (c for c in case_names(runs) if c.startswith(model_dir.name + "/")):
            for rank in runs:
                # Terms of both signs nearly cancel: the error is relative to their size, not to what is left.
                assert abs(rank[case]["metrics"]["loss"] - loss) < 1e-6 * scale, case
                assert rank[case]["grad_norm"] == pytest.approx(grad_norm, rel=2e-5), case
                assert rank[case]["metrics"]["tokens"] == sum(len(r) for _, r in sequences(groups)), case


def test_loss_is_the_same_in_every_layout_and_packing(runs) -> None:
    for family in {case.split("/")[0] for case in case_names(runs)}:
        losses = {case: runs[0][case]["metrics"]["loss"] for case in case_names(runs) if case.startswith(family + "/")}
        # The losses are sums of terms of order 1 that nearly cancel.
        assert max(losses.values()) - min(losses.values()) < 2e-7, losses


def test_weights_after_updates_agree_across_layouts(runs, export_dir) -> None:
    from safetensors.torch import load_file

    for family in {case.split("/")[0] for case in case_names(runs)}:
        folders = sorted(f for f in export_dir.iterdir() if f.name.startswith(family + "-tp"))
        reference = load_file(folders[0] / "model.safetensors")
        for folder in folders[1:]:
            weights = load_file(folder / "model.safetensors")
            assert weights.keys() == reference.keys()
            for name, tensor in weights.items():
                if name.endswith("k_proj.bias"):
                    continue  # shifts all scores of a query alike, so its gradient is rounding noise, which Adam blows up
                diff = (tensor - reference[name]).abs()
                # Adam divides a gradient by its own size: where it is next to nothing, its rounding moves a weight by a part of
                # the learning rate (1e-3). A wrong gradient moves most weights by that much.
                assert diff.max() < 1e-4, f"{folder.name}: {name}"
                assert (diff < 1e-5).float().mean() > 0.995, f"{folder.name}: {name}"


def test_first_ratio_is_exactly_one(runs) -> None:
    for case in case_names(runs):
        assert abs(runs[0][case]["metrics"]["ppo_kl"]) == 0.0, case
        assert runs[0][case]["metrics"]["ratio"] == runs[0][case]["metrics"]["tokens"], case


def test_reference_log_probs_stay_the_initial_ones_bit_for_bit(runs) -> None:
    for case in case_names(runs):
        for rank in runs:
            assert rank[case]["reference"] == {"initial": True, "policy_moved": True, "restored": True}, case


def test_options_beside_dapo_equal_a_float64_reference(runs, models, groups) -> None:
    loss, grad_norm, tokens = float64_options(models[0], groups)
    cases = [case for case in case_names(runs) if case.startswith("options:")]
    assert len(cases) == 2
    for case in cases:
        for rank in runs:
            assert rank[case]["metrics"]["loss"] == pytest.approx(loss, abs=1e-6), case
            assert rank[case]["grad_norm"] == pytest.approx(grad_norm, rel=2e-5), case
            assert rank[case]["metrics"]["tokens"] == tokens < sum(len(r) for _, r in sequences(groups)), case
            assert 0 < rank[case]["metrics"]["is_masked"] < tokens, case


def test_an_update_that_is_not_finite_changes_nothing(runs) -> None:
    for case in case_names(runs):
        assert all(rank[case]["skipped_update_changed"] == [] for rank in runs), case


def float64_loss_and_gradient_norm(model_dir: Path, groups: list[dict[str, Any]]) -> tuple[float, float, float]:
    """DAPO's loss at ratio 1, the norm of its gradient, and the sum of the loss terms' sizes.

    Written out in float64 with transformers' autograd.
    """
    model = load_model(model_dir).double()
    total_tokens = sum(len(r) for _, r in sequences(groups))
    loss = torch.zeros((), dtype=torch.float64)
    scale = 0.0
    flat = iter(sequences(groups))
    for group in groups:
        rewards = group["rewards"].astype(np.float64)
        spread = rewards.std(ddof=1)
        advantages = (rewards - rewards.mean()) / (spread + 1e-6) if np.ptp(rewards) > 0 else np.zeros_like(rewards)
        bounds = group["packed"]["offsets"]
        for i, advantage in enumerate(advantages):
            prompt, response = next(flat)
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
            old = logprobs.detach()
            behaviour = torch.from_numpy(group["packed"]["behaviour_logprobs"][bounds[i] : bounds[i + 1]]).double()
            weight = torch.exp(old - behaviour).clamp(max=2.0)
            ratio = torch.exp(logprobs - old)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            terms = weight * surrogate / total_tokens
            loss = loss - terms.sum()
            scale += float(terms.detach().abs().sum())
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    return float(loss.detach()), float(norm), scale


def float64_options(model_dir: Path, groups: list[dict[str, Any]]) -> tuple[float, float, int]:
    """The loss of the algorithm `options` at ratio 1, the norm of its gradient, and the number of trained tokens."""
    options = ALGORITHMS["options"]
    model = load_model(model_dir).double()
    flat = sequences(groups)
    trained = [r for _, r in flat if len(r) < TRUNCATED_LENGTH]
    loss = torch.zeros((), dtype=torch.float64)
    responses = iter(flat)
    for group in groups:
        rewards = group["rewards"].astype(np.float64)
        bounds = group["packed"]["offsets"]
        for i, reward in enumerate(rewards):
            prompt, response = next(responses)
            if len(response) >= TRUNCATED_LENGTH:
                continue
            advantage = reward - (rewards.sum() - reward) / (len(rewards) - 1)
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            everything = torch.log_softmax(logits, -1)
            logprobs = everything.gather(1, torch.tensor(response)[:, None])[:, 0]
            entropy = -(everything.exp() * everything).sum(-1)
            old = logprobs.detach()
            behaviour = torch.from_numpy(group["packed"]["behaviour_logprobs"][bounds[i] : bounds[i + 1]]).double()
            weight = torch.exp(old - behaviour)
            weight = torch.where((weight >= 0.5) & (weight <= 2.0), weight, 0.0)
            ratio = torch.exp(logprobs - old)
            kl = logprobs - old  # the policy still is the reference, so that only the gradient is left
            terms = -weight * ratio * advantage + options["kl"]["coef"] * kl - options["entropy_coef"] * entropy
            loss = loss + terms.mean() / len(trained)
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    return float(loss.detach()), float(norm), sum(len(r) for r in trained)
