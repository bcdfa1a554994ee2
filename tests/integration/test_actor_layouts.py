"""Real Megatron actors of every family in many layouts against Hugging Face transformers and a float64 reference of the loss.

The default run has every family and every kind of layout at least once, on four processes. The full grid, on eight, runs with
`pytest -m grid tests/integration/test_actor_layouts.py`, a family at a time with `-k`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoint_convert.architecture import read_architecture
from dapo_megatron.config.validate import check_layout
from tests.integration.actor_ranks import (
    ALGORITHMS,
    TRUNCATED_LENGTH,
    Layout,
    make_config,
    make_groups,
    run_layouts,
)
from tests.ranks import run_ranks
from tests.toy_models import VOCAB_SIZE, hf_logprobs, load_model, make_model

pytestmark = pytest.mark.timeout(3600)  # the first test waits for all cases; `run_ranks` has the tighter limit

GROUPS, GROUP_SIZE, UPDATES = 4, 3, 3

# Every kind of layout on one dense family.
DENSE = [
    Layout(),
    Layout(max_tokens=90),
    Layout(padded=True),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
    Layout(pp=4),
    Layout(pp=2, vp=2, max_tokens=90),
    Layout(tp=2, pp=2, vp=2, sequence_parallel=True, padded=True),
    Layout(distributed_optimizer=False),
    Layout(algorithm="options"),
    Layout(tp=2, pp=2, max_tokens=90, algorithm="options"),
    Layout(pp=2, label="uneven", megatron={"num_layers_in_first_pipeline_stage": 1}),
    Layout(
        tp=2,
        label="recompute-all",
        megatron={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    Layout(label="recompute-attention", megatron={"recompute_granularity": "selective"}),
    Layout(tp=2, label="overlap", megatron={"overlap_grad_reduce": True, "overlap_param_gather": True}),
    Layout(
        pp=2, vp=2, max_tokens=90, label="overlap", megatron={"overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    Layout(dtype="bfloat16"),
    Layout(tp=2, pp=2, sequence_parallel=True, dtype="bfloat16"),
]
# The other families in the layouts that split what is special about them.
TWO_WAY = [Layout(), Layout(tp=2, pp=2), Layout(tp=4)]
EXPERTS = [
    Layout(ep=4),
    Layout(ep=2, max_tokens=90),
    Layout(pp=2, ep=2),
    Layout(tp=2, ep=2, etp=1, sequence_parallel=True),
    Layout(tp=2, pp=2, sequence_parallel=True),
]
FAMILIES: dict[str, tuple[str, dict[str, Any], list[Layout]]] = {
    "qwen3-untied": ("qwen3", {"tie": False, "num_hidden_layers": 4}, DENSE),
    "qwen2-tied": ("qwen2", {"tie": True, "num_hidden_layers": 2}, TWO_WAY),
    "llama-tied": ("llama", {"tie": True, "vocab_size": VOCAB_SIZE + 3}, TWO_WAY),
    "mistral": ("mistral", {}, [Layout(tp=2), Layout(pp=2)]),
    "glm": ("glm", {}, TWO_WAY[1:]),
    "gemma": ("gemma", {"tie": True}, TWO_WAY[1:]),
    "qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 4}, EXPERTS),
    "mixtral": ("mixtral", {"tie": False}, EXPERTS[1:4]),
    "deepseek-v3": ("deepseek_v3", {"num_hidden_layers": 4}, EXPERTS[1:]),
    "glm4-moe": ("glm4_moe", {"num_hidden_layers": 4}, EXPERTS[2:]),
}


@dataclass(frozen=True)
class Reference:
    """What float64 autograd says about the mini-batch: loss, size of its terms, gradients by the names in the files."""

    loss: float
    scale: float
    gradients: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        return float(torch.sqrt(sum((g.double() ** 2).sum() for g in self.gradients.values())))


@dataclass(frozen=True)
class Runs:
    """Results of all cases on each rank, and the files that rank 0 wrote."""

    ranks: list[dict[str, Any]]
    folder: Path

    @property
    def cases(self) -> list[str]:
        return sorted(self.ranks[0])

    def of(self, name: str, dtype: str = "float32") -> list[str]:
        """Cases of one model under DAPO's own algorithm."""
        cases = [case for case in self.cases if case.startswith(name + "/")]
        return [case for case in cases if ("bfloat16" in case) == (dtype == "bfloat16")]

    def tensors(self, case: str, kind: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{case.replace('/', '@')}.{kind}.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_model(root / name, family, seed=seed, **settings)
        for seed, (name, (family, settings, _)) in enumerate(FAMILIES.items(), start=1)
    }


@pytest.fixture(scope="module")
def groups() -> list[dict[str, Any]]:
    return make_groups(VOCAB_SIZE, GROUPS, GROUP_SIZE, seed=7)


@pytest.fixture(scope="module")
def references(models: dict[str, Path], groups: list[dict[str, Any]]) -> dict[str, Reference]:
    return {name: float64_reference(folder, groups) for name, folder in models.items()}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], groups: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    cases = [(str(models[name]), layout) for name, (_, _, layouts) in FAMILIES.items() for layout in layouts]
    return Runs(run_ranks(4, run_layouts, cases, groups, GROUP_SIZE, UPDATES, str(folder), timeout_s=600), folder)


def grid_layouts(folder: Path) -> list[Layout]:
    """All layouts on eight ranks that the model allows."""
    arch = read_architecture(folder)
    layouts = []
    for tp, pp, vp in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)):
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            for ep in (1, 2) if arch.moe else (1,):
                for padded in (False, True):
                    layout = Layout(
                        tp,
                        pp,
                        sequence_parallel,
                        vp=vp,
                        ep=ep,
                        etp=1 if ep > 1 and tp > 1 else None,
                        padded=padded,
                        max_tokens=90,
                    )
                    config = make_config(str(folder), layout, 8, groups=GROUPS, group_size=GROUP_SIZE)
                    if not check_layout(config, arch):
                        layouts.append(layout)
    return layouts


def sequences(groups: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    flat = []
    for group in groups:
        packed = group["packed"]
        for start, end in zip(packed["offsets"][:-1], packed["offsets"][1:], strict=True):
            flat.append((packed["prompt_ids"].tolist(), packed["response_ids"][start:end].tolist()))
    return flat


def check_against_transformers(runs: Runs, models: dict[str, Path], groups: list[dict[str, Any]]) -> None:
    for name, folder in models.items():
        model = load_model(folder).double()  # whose own rounding is then no part of the difference
        expected = [hf_logprobs(model, [*p, *r])[len(p) - 1 :].numpy() for p, r in sequences(groups)]
        for case in runs.of(name):
            seen: dict[int, np.ndarray] = {}
            for rank in runs.ranks:
                seen |= rank[case]["logprobs"]
            assert sorted(seen) == list(range(GROUPS * GROUP_SIZE)), f"{case}: samples missing or doubled"
            worst = max(np.abs(seen[i] - expected[i]).max() for i in seen)
            assert worst < 1e-5, f"{case}: {worst}"


def check_gradients(runs: Runs, references: dict[str, Reference]) -> None:
    for name, reference in references.items():
        for case in runs.of(name):
            gradients = runs.tensors(case, "grads")
            assert gradients.keys() == reference.gradients.keys(), case
            for tensor_name, expected in reference.gradients.items():
                error = (gradients[tensor_name].double() - expected).norm()
                # A gradient that is zero by symmetry (k_proj.bias) has rounding noise only.
                assert error < 1e-4 * expected.norm() + 1e-7 * reference.grad_norm, f"{case}: {tensor_name}: {error}"


def check_weights(runs: Runs) -> None:
    for name in {case.split("/")[0] for case in runs.cases}:
        cases = runs.of(name)
        assert len(cases) > 1, name
        first = runs.tensors(cases[0], "weights")
        for case in cases[1:]:
            weights = runs.tensors(case, "weights")
            assert weights.keys() == first.keys()
            for tensor_name, tensor in weights.items():
                diff = (tensor - first[tensor_name]).abs().max()
                assert diff < 1e-5, f"{case}: {tensor_name} differs by {diff} from {cases[0]}"


def test_logprobs_equal_transformers_in_every_layout(runs, models, groups) -> None:
    check_against_transformers(runs, models, groups)


def test_every_gradient_equals_float64_autograd_in_every_layout(runs, references) -> None:
    check_gradients(runs, references)


def test_loss_and_gradient_norm_equal_float64_in_every_layout(runs, references, groups) -> None:
    tokens = sum(len(r) for _, r in sequences(groups))
    for name, reference in references.items():
        for case in runs.of(name):
            for rank in runs.ranks:
                # Terms of both signs nearly cancel: the error is relative to their size, not to what is left.
                assert abs(rank[case]["metrics"]["loss"] - reference.loss) < 1e-6 * reference.scale, case
                assert rank[case]["grad_norm"] == pytest.approx(reference.grad_norm, rel=2e-5), case
                assert rank[case]["metrics"]["tokens"] == tokens, case


def test_loss_is_the_same_in_every_layout_and_packing(runs, models) -> None:
    for name in models:
        losses = {case: runs.ranks[0][case]["metrics"]["loss"] for case in runs.of(name)}
        # The losses are sums of terms of order 1 that nearly cancel.
        assert max(losses.values()) - min(losses.values()) < 2e-7, losses


def test_weights_after_clipped_updates_agree_across_layouts(runs, references) -> None:
    assert all(reference.grad_norm > 0.5 for reference in references.values()), "clipping is not active"
    check_weights(runs)


def test_first_ratio_is_exactly_one(runs) -> None:
    for case in runs.cases:
        assert abs(runs.ranks[0][case]["metrics"]["ppo_kl"]) == 0.0, case
        assert runs.ranks[0][case]["metrics"]["ratio"] == runs.ranks[0][case]["metrics"]["tokens"], case


def test_reference_log_probs_stay_the_initial_ones_bit_for_bit(runs) -> None:
    for case in runs.cases:
        for rank in runs.ranks:
            if "overlap" not in case:  # refused together with a reference policy
                assert rank[case]["reference"] == {"initial": True, "policy_moved": True, "restored": True}, case


def test_options_beside_dapo_equal_a_float64_reference(runs, models, groups) -> None:
    loss, grad_norm, tokens = float64_options(models["qwen3-untied"], groups)
    cases = [case for case in runs.cases if case.startswith("options:")]
    assert len(cases) == 2
    for case in cases:
        for rank in runs.ranks:
            assert rank[case]["metrics"]["loss"] == pytest.approx(loss, abs=1e-6), case
            assert rank[case]["grad_norm"] == pytest.approx(grad_norm, rel=2e-5), case
            assert rank[case]["metrics"]["tokens"] == tokens < sum(len(r) for _, r in sequences(groups)), case
            assert 0 < rank[case]["metrics"]["is_masked"] < tokens, case


def test_bfloat16_is_close_and_accumulates_in_float32(runs, models, references, groups) -> None:
    model = load_model(models["qwen3-untied"])
    expected = [hf_logprobs(model, [*p, *r])[len(p) - 1 :].numpy() for p, r in sequences(groups)]
    cases = runs.of("qwen3-untied", "bfloat16")
    assert len(cases) == 2
    weights = [runs.tensors(case, "weights") for case in cases]
    for case in cases:
        seen: dict[int, np.ndarray] = {}
        for rank in runs.ranks:
            seen |= rank[case]["logprobs"]
        errors = np.concatenate([np.abs(seen[i] - expected[i]) for i in seen])
        assert errors.mean() < 0.1, f"{case}: {errors.mean()}"
        assert runs.ranks[0][case]["grad_norm"] == pytest.approx(references["qwen3-untied"].grad_norm, rel=0.1), case
    # Both round float32 main weights that moved by about the same.
    same = [float((weights[0][name] == weights[1][name]).float().mean()) for name in weights[0]]
    assert np.mean(same) > 0.8, same
    assert max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]) < 0.02


def test_an_update_that_is_not_finite_changes_nothing(runs) -> None:
    for case in runs.cases:
        assert all(rank[case]["skipped_update_changed"] == [] for rank in runs.ranks), case


@pytest.mark.grid
@pytest.mark.parametrize("name", FAMILIES)
def test_full_grid(name: str, models, references, groups, tmp_path: Path) -> None:
    """A family in every layout that is legal for it, on eight processes."""
    cases = [(str(models[name]), layout) for layout in grid_layouts(models[name])]
    runs = Runs(run_ranks(8, run_layouts, cases, groups, GROUP_SIZE, UPDATES, str(tmp_path), timeout_s=1800), tmp_path)
    check_against_transformers(runs, {name: models[name]}, groups)
    check_gradients(runs, {name: references[name]})
    check_weights(runs)


def float64_reference(model_dir: Path, groups: list[dict[str, Any]]) -> Reference:
    """DAPO's loss at ratio 1, written out in float64 with transformers' autograd."""
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
    return Reference(float(loss.detach()), scale, gradients_by_file_name(model, model_dir))


def gradients_by_file_name(model: Any, model_dir: Path) -> dict[str, torch.Tensor]:
    """Gradients under the names and shapes of the tensors on disk (transformers holds experts in other tensors than the files)."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in model.buffers():  # a router's selection bias has no gradient
            buffer.zero_()
    folder = model_dir.parent / f"{model_dir.name}-gradients"
    model.save_pretrained(str(folder))
    return load_file(folder / "model.safetensors")


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
