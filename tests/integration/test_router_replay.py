"""Router replay from end to end: a real server tells its expert choices, real Megatron actors follow them (or any others).

Transformers is the judge on both sides: its routers choose what the server says, and forced to other choices it gives the
log-probs and gradients that the actors give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoint_convert.architecture import read_architecture
from dapo_megatron.config.routing import routing_shape
from rollout_service.engine import Completion, EngineClient, vocabulary_size
from rollout_service.routed_experts import expert_dtype
from rollout_service.sample import Group, Sample, pack_group, routed_experts_of
from rollout_service.server_process import SglangServer
from tests.integration.actor_ranks import Layout, make_groups
from tests.integration.router_replay_ranks import run_replay
from tests.integration.test_actor_layouts import gradients_by_file_name
from tests.ranks import run_ranks
from tests.service_settings import service_settings
from tests.toy_models import hf_logprobs, load_model, make_model

PROMPTS = [[22, 18, 21, 23, 66, 61, 58], [9, 40, 31], [22, 18, 21, 23, 66, 11]]
RESPONSES = 3  # a prompt
RECOMPUTE_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FORCED = {
    "sparse": [
        Layout(tp=2, ep=2, etp=1, sequence_parallel=True, max_tokens=90, label="all", megatron=RECOMPUTE_ALL),
        Layout(pp=2, vp=2, max_tokens=90, label="all", megatron=RECOMPUTE_ALL),
        Layout(
            pp=2,
            max_tokens=90,
            label="experts",
            megatron={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        ),
    ],
    "grouped": [Layout(ep=2, max_tokens=90)],
}


class HFRouters:
    """Transformers' routers of a model: what they choose, and what they are made to choose. Layers without experts have none."""

    def __init__(self, model: Any) -> None:
        model.set_experts_implementation("eager")  # the default one knows no float64
        self.model = model
        self.layers = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]
        self.forced: np.ndarray | None = None
        self.chosen: dict[int, np.ndarray] = {}
        for column, layer in enumerate(self.layers):
            model.model.layers[layer].mlp.gate.register_forward_hook(
                lambda gate, inputs, outputs, column=column: self._after(column, gate, outputs)
            )

    def _after(self, column: int, gate: Any, outputs: tuple[Any, ...]) -> Any:
        logits, _, chosen = outputs
        if self.forced is None:
            self.chosen[column] = chosen.numpy().copy()
            return None
        indices = torch.from_numpy(self.forced[:, column].astype(np.int64))
        sigmoid = hasattr(gate, "e_score_correction_bias")
        scores = (logits.sigmoid() if sigmoid else logits.softmax(-1)).gather(1, indices)
        scores = scores / scores.sum(-1, keepdim=True) * (gate.routed_scaling_factor if sigmoid else 1.0)
        return logits, scores.to(outputs[1].dtype), indices

    def own_choices(self, ids: list[int]) -> np.ndarray:
        """`[len(ids), moe_layers, top_k]`, best expert first."""
        self.forced, self.chosen = None, {}
        with torch.no_grad():
            self.model(torch.tensor([ids]))
        return np.stack([self.chosen[column] for column in range(len(self.layers))], axis=1)

    def logprobs(self, prompt: list[int], response: list[int], choices: np.ndarray) -> torch.Tensor:
        """Log-probs of the response with forced choices `[p + n - 1, moe_layers, top_k]`."""
        self.forced = choices
        logits = self.model(torch.tensor([[*prompt, *response][:-1]])).logits[0, len(prompt) - 1 :]
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@dataclass(frozen=True)
class Served:
    """Completions of the prompts, prompt-major, of one server and the model it served."""

    folder: Path
    completions: list[Completion]
    resumed: Completion
    versions: tuple[tuple[int, int], ...]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("replay")
    # Every layer has experts: SGLang 0.5.23 gives Qwen3-MoE no dense layer, whatever the model's config says.
    folder = make_model(root / "served", "qwen3_moe", seed=3, mlp_only_layers=[], num_experts_per_tok=3)
    shape = routing_shape(read_architecture(folder))
    assert shape is not None
    settings = service_settings(root, folder, rollout={"router_replay": True}, routing=shape)
    server = SglangServer(settings, engine_id=0, device="cpu")

    async def complete(client: EngineClient) -> tuple[list[Completion], Completion]:
        sampling = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True}
        first = await client.generate(PROMPTS[0], sampling, "first", routed_experts=True)
        # All at once: ragged lengths, and the first prompt comes out of the prefix cache.
        calls = [
            client.generate(prompt, sampling | {"max_new_tokens": 8 + 5 * i}, f"r{p}-{i}", routed_experts=True)
            for p, prompt in enumerate(PROMPTS)
            for i in range(RESPONSES)
        ]
        completions = await asyncio.gather(*calls)
        # As in a weight update: the request gives up its cache, and goes on from its tokens.
        long = asyncio.create_task(
            client.generate(PROMPTS[1], sampling | {"max_new_tokens": 200}, "paused", routed_experts=True)
        )
        await asyncio.sleep(0.4)
        await client.pause("retract")
        assert not long.done()
        await client.flush_cache()
        await client.resume()
        return [first, *completions], await long

    async def with_client() -> tuple[list[Completion], Completion]:
        client = EngineClient(endpoint, vocabulary_size(str(folder)), 60.0, 30.0, shape)
        try:
            return await complete(client)
        finally:
            await client.close()

    endpoint = server.start(str(folder), version=0)
    try:
        completions, resumed = asyncio.run(with_client())
    finally:
        server.stop()
    yield Served(folder, completions, resumed, resumed.versions)


def prompts_of(served: Served) -> list[list[int]]:
    return [PROMPTS[0], *(prompt for prompt in PROMPTS for _ in range(RESPONSES))]


def assert_choices_are_transformers(routers: HFRouters, prompt: list[int], completion: Completion) -> None:
    ids = prompt + completion.ids.tolist()
    assert completion.routed_experts is not None
    assert completion.routed_experts.shape == (len(ids) - 1, 3, 3)
    assert completion.routed_experts.dtype == np.uint8
    expected = routers.own_choices(ids)[:-1]
    np.testing.assert_array_equal(np.sort(completion.routed_experts, -1), np.sort(expected, -1))


def test_served_choices_cover_every_token_and_are_those_of_transformers(served: Served) -> None:
    model = load_model(served.folder)
    routers = HFRouters(model)
    for prompt, completion in zip(prompts_of(served), served.completions, strict=True):
        assert_choices_are_transformers(routers, prompt, completion)
        expected = hf_logprobs(model, prompt + completion.ids.tolist())[len(prompt) - 1 :].numpy()
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    assert len({len(completion.ids) for completion in served.completions}) == RESPONSES + 1


def test_a_request_that_gave_up_its_cache_still_has_choices_for_every_token(served: Served) -> None:
    assert len(served.resumed.ids) == 200
    assert_choices_are_transformers(HFRouters(load_model(served.folder)), PROMPTS[1], served.resumed)


def served_groups(served: Served) -> list[dict[str, Any]]:
    made = []
    for p, prompt in enumerate(PROMPTS):
        samples = [
            Sample(c.ids, c.logprobs, c.versions, c.finish_reason, routed_experts=c.routed_experts)
            for c in served.completions[1 + p * RESPONSES : 1 + (p + 1) * RESPONSES]
        ]
        group = Group(p, str(p), 0, np.array(prompt, np.int32), "", samples)
        made.append({"packed": pack_group(group), "rewards": np.array([1.0, -1.0, 0.5], np.float32)})
    return made


def forced_groups(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Random groups with random choices."""
    arch = read_architecture(folder)
    moe = arch.moe
    assert moe is not None
    groups = make_groups(arch.vocab_size, 4, 3, seed=seed)
    rng = np.random.default_rng(seed)
    for group in groups:
        packed = group["packed"]
        rows = len(packed["response_ids"]) + 3 * (len(packed["prompt_ids"]) - 1)
        ranking = rng.permuted(np.tile(np.arange(moe.num_experts), (rows, sum(moe.moe_layers), 1)), axis=-1)
        packed["routed_experts"] = ranking[..., : moe.top_k].astype(expert_dtype(moe.num_experts))
    return groups


@dataclass(frozen=True)
class Replays:
    """Models, groups and results of the actors: on each rank, by case."""

    models: dict[str, Path]
    groups: dict[str, list[dict[str, Any]]]
    ranks: list[dict[str, dict[str, Any]]]
    folder: Path

    def logprobs(self, case: str, which: str) -> dict[int, np.ndarray]:
        return {sample: value for rank in self.ranks for sample, value in rank[case][which].items()}


@pytest.fixture(scope="module")
def replays(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Replays:
    root = tmp_path_factory.mktemp("forced")
    models = {
        "served": served.folder,
        "sparse": make_model(root / "sparse", "qwen3_moe", seed=5, num_hidden_layers=4, mlp_only_layers=[1]),
        "grouped": make_model(
            root / "grouped", "glm4_moe", seed=6, n_group=4, topk_group=2, num_experts_per_tok=4, n_shared_experts=2
        ),
    }
    groups = {name: forced_groups(folder, seed=7) for name, folder in models.items() if name != "served"}
    groups["served"] = served_groups(served)
    cases = [(str(models[name]), layout, groups[name]) for name, layouts in FORCED.items() for layout in layouts]
    cases.append((str(models["served"]), Layout(max_tokens=90), groups["served"]))
    return Replays(models, groups, run_ranks(2, run_replay, cases, str(root)), root)


def samples_of(groups: list[dict[str, Any]]) -> Iterator[tuple[list[int], list[int], np.ndarray, dict[str, Any], int]]:
    for group in groups:
        packed = group["packed"]
        for i, (start, end) in enumerate(zip(packed["offsets"], packed["offsets"][1:], strict=False)):
            response = packed["response_ids"][start:end].tolist()
            yield packed["prompt_ids"].tolist(), response, routed_experts_of(packed, i), group, i


FORCED_CASES = [f"{name}/{layout.name}" for name, layouts in FORCED.items() for layout in layouts]


@pytest.mark.parametrize("case", FORCED_CASES)
def test_forced_choices_give_the_log_probs_of_transformers_forced_alike(replays: Replays, case: str) -> None:
    name = case.split("/")[0]
    routers = HFRouters(load_model(replays.models[name]))
    forced, own = replays.logprobs(case, "replayed"), replays.logprobs(case, "own")
    for sample, (prompt, response, choices, _, _) in enumerate(samples_of(replays.groups[name])):
        with torch.no_grad():
            expected = routers.logprobs(prompt, response, choices).numpy()
        np.testing.assert_allclose(forced[sample], expected, atol=2e-5)
        routers.forced = None
        free = hf_logprobs(routers.model, prompt + response)[len(prompt) - 1 :].numpy()
        np.testing.assert_allclose(own[sample], free, atol=2e-5)
    assert sample == 11
    moved = np.concatenate([np.abs(forced[s] - own[s]) for s in forced])
    assert np.median(moved) > 0.1
    assert all(rank[case]["repeatable"] for rank in replays.ranks)


@pytest.mark.parametrize("case", FORCED_CASES)
def test_gradients_follow_the_forced_choices_through_recomputation(replays: Replays, case: str) -> None:
    name = case.split("/")[0]
    assert all(
        rank[case]["micro_batches"] >= 3 for rank in replays.ranks
    )  # several of them are in flight in a pipeline
    expected = forced_gradients(replays.models[name], replays.groups[name])
    got = load_file(replays.folder / f"{case.replace('/', '@')}.safetensors")
    assert set(got) == set(expected)
    trained = {key: gradient for key, gradient in got.items() if "e_score_correction_bias" not in key}
    norm = torch.sqrt(sum((expected[key] ** 2).sum() for key in trained))
    for key, gradient in trained.items():
        torch.testing.assert_close(
            gradient.double(),
            expected[key].double(),
            rtol=1e-3,
            atol=1e-5 * float(norm),
            msg=lambda m, k=key: f"{k}: {m}",
        )
    assert max(float(g.abs().max()) for key, g in got.items() if ".gate.weight" in key) > 1e-3 * float(norm)


def test_a_training_pass_with_and_without_choices_is_refused(replays: Replays) -> None:
    said = [rank[FORCED_CASES[0]]["mixed"] for rank in replays.ranks]
    assert said == ["a micro-batch without expert choices after one with: recomputation could not tell them apart"] * 2


def forced_gradients(folder: Path, groups: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """DAPO's loss at ratio 1 with transformers' autograd in float64, every router forced."""
    routers = HFRouters(load_model(folder).double())
    total = sum(len(group["packed"]["response_ids"]) for group in groups)
    for prompt, response, choices, group, i in samples_of(groups):
        rewards = group["rewards"].astype(np.float64)
        spread = np.ptp(rewards)
        advantage = (rewards[i] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if spread > 0 else 0.0
        logprobs = routers.logprobs(prompt, response, choices)
        start, end = group["packed"]["offsets"][i : i + 2]
        behaviour = torch.from_numpy(group["packed"]["behaviour_logprobs"][start:end]).double()
        weight = torch.exp(logprobs.detach() - behaviour).clamp(max=2.0)
        (-(weight * advantage * logprobs).sum() / total).backward()
    return gradients_by_file_name(routers.model, folder)


def test_an_actor_that_follows_the_engine_agrees_with_its_log_probs(replays: Replays, served: Served) -> None:
    got = replays.logprobs(f"{served.folder.name}/{Layout(max_tokens=90).name}", "replayed")
    assert len(got) == len(PROMPTS) * RESPONSES
    for sample, completion in enumerate(served.completions[1:]):
        np.testing.assert_allclose(got[sample], completion.logprobs, atol=1e-4)
