"""The engines' expert choices, from the server's reply to the object store: complete, in range, or an engine fault."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollout_service.config import RoutingShape
from rollout_service.engine import Completion
from rollout_service.group_runner import GroupRunner
from rollout_service.prompts import Prompt
from rollout_service.routed_experts import RoutedExpertsError, expert_dtype, parse_routed_experts
from rollout_service.sample import FinishReason, Group, Sample, pack_group, routed_experts_of
from rollout_service.server_process import argument_list, server_arguments
from tests.service_settings import service_settings

SHAPE = RoutingShape(num_layers=4, moe_layers=(1, 3), num_experts=6, top_k=2)
ROUTING = {"num_layers": 4, "moe_layers": (1, 3), "num_experts": 6, "top_k": 2}


def numbers(tokens: int, seed: int = 0) -> np.ndarray:
    """int32 `[tokens - 1, 4, 2]` as SGLang records them: zeros in layers without experts."""
    rng = np.random.default_rng(seed)
    made = np.stack([rng.permuted(np.arange(6))[:2] for _ in range((tokens - 1) * 4)]).reshape(tokens - 1, 4, 2)
    made[:, [0, 2]] = 0
    return made.astype(np.int32)


def meta(recorded: np.ndarray) -> dict[str, Any]:
    return {"routed_experts": base64.b64encode(recorded.astype("<i4").tobytes()).decode()}


def test_layers_with_experts_are_kept_in_a_byte_each() -> None:
    recorded = numbers(9)
    got = parse_routed_experts(meta(recorded), 9, SHAPE)
    assert (got.shape, got.dtype) == ((8, 2, 2), np.uint8)
    np.testing.assert_array_equal(got, recorded[:, [1, 3]])


def test_a_byte_holds_256_experts_and_no_more() -> None:
    assert [expert_dtype(n) for n in (8, 256, 257, 1024)] == [np.uint8, np.uint8, np.int16, np.int16]


def test_one_token_has_no_choice() -> None:
    assert parse_routed_experts({"routed_experts": ""}, 1, SHAPE).shape == (0, 2, 2)


def test_a_server_that_does_not_return_them_is_told_which_argument_it_lacks() -> None:
    with pytest.raises(RoutedExpertsError, match="--enable-return-routed-experts"):
        parse_routed_experts({}, 9, SHAPE)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda a: a[:-1], r"has 224 bytes, but 9 tokens .* 4 layers and 2 experts a token make 256"),
        (lambda a: np.concatenate([a, a[:1]]), "has 288 bytes"),
        (lambda a: a[:, :3], "has 192 bytes"),
    ],
)
def test_choices_that_do_not_cover_the_tokens_are_a_fault(spoil: Any, message: str) -> None:
    with pytest.raises(RoutedExpertsError, match=message):
        parse_routed_experts(meta(spoil(numbers(9))), 9, SHAPE)


@pytest.mark.parametrize("number", [6, -1, 70000])
def test_a_number_that_is_no_expert_is_a_fault(number: int) -> None:
    recorded = numbers(9)
    recorded[5, 3] = (number, 2)
    with pytest.raises(RoutedExpertsError, match=rf"token 5 of 9 went to experts \[{number}, 2\] in layer 3.* 0\.\.5"):
        parse_routed_experts(meta(recorded), 9, SHAPE)


def test_a_row_that_the_engine_never_wrote_is_a_fault() -> None:
    recorded = numbers(9)
    recorded[7] = 0
    with pytest.raises(
        RoutedExpertsError, match=r"token 7 of 9 went to experts \[0, 0\] in layer 1: the same one twice"
    ):
        parse_routed_experts(meta(recorded), 9, SHAPE)


@pytest.mark.parametrize("text", ["AA", "A*==", 7])
def test_broken_text_is_a_fault(text: Any) -> None:
    with pytest.raises(RoutedExpertsError, match="no base64 text"):
        parse_routed_experts({"routed_experts": text}, 9, SHAPE)


def make_group(lengths: list[int], prompt: int, with_choices: bool = True) -> Group:
    samples = []
    for index, n in enumerate(lengths):
        chosen = parse_routed_experts(meta(numbers(prompt + n, seed=index)), prompt + n, SHAPE)
        samples.append(
            Sample(
                np.arange(n, dtype=np.int32),
                np.zeros(n, np.float32),
                ((0, n),),
                FinishReason.STOP,
                routed_experts=chosen if with_choices else None,
            )
        )
    return Group(3, "p", 0, np.arange(prompt, dtype=np.int32), "7", samples)


def test_each_sample_gets_its_choices_back_from_the_packed_group() -> None:
    group = make_group([4, 1, 7], prompt=5)
    packed = pack_group(group)
    assert packed["routed_experts"].shape == (8 + 5 + 11, 2, 2)
    for index, sample in enumerate(group.samples):
        np.testing.assert_array_equal(routed_experts_of(packed, index), sample.routed_experts)


def test_without_replay_nothing_is_packed() -> None:
    packed = pack_group(make_group([4, 1], prompt=5, with_choices=False))
    assert "routed_experts" not in packed
    with pytest.raises(ValueError, match=r"without expert choices, although rollout\.router_replay is on"):
        routed_experts_of(packed, 0)


def test_a_group_whose_choices_miss_a_token_is_not_packed() -> None:
    group = make_group([4, 1, 7], prompt=5)
    assert group.samples[2].routed_experts is not None
    group.samples[2].routed_experts = group.samples[2].routed_experts[1:]
    with pytest.raises(
        ValueError, match=r"group 3: expert choices cover \[8, 5, 10\] tokens .* instead of \[8, 5, 11\]"
    ):
        pack_group(group)
    group.samples[2].routed_experts = None
    with pytest.raises(ValueError, match=r"cover \[8, 5\] tokens"):
        pack_group(group)


def test_training_asks_for_the_choices_and_evaluation_does_not(tmp_path: Path) -> None:
    import asyncio

    settings = service_settings(tmp_path, tmp_path, rollout={"router_replay": True}, routing=ROUTING)
    asked: list[bool] = []

    class Fleet:
        version = 0

        async def generate(self, ids: list[int], sampling: Any, rid: str, priority: Any, routed_experts: bool) -> Any:
            asked.append(routed_experts)
            chosen = parse_routed_experts(meta(numbers(5)), 5, SHAPE) if routed_experts else None
            return Completion(np.arange(3), np.zeros(3), ((0, 3),), FinishReason.STOP, chosen)

    class Rewards:
        per_group = True
        last_fault = ""

        async def score_group(self, items: Any) -> Any:
            from rollout_service.rewards import Score

            return [Score(1.0, None, None, {}) for _ in items]

    runner = GroupRunner(settings.rollout, Fleet(), Rewards(), lambda ids: "", [2], seed=1)  # type: ignore[arg-type]
    prompt = Prompt("a:1", 0, "q", np.array([8, 9], dtype=np.int32), "7")
    group = asyncio.run(runner.run_training_group(0, prompt))
    assert asked == [True] * 3
    assert [len(s.routed_experts) for s in group.samples if s.routed_experts is not None] == [4, 4, 4]
    asyncio.run(runner.run("eval", prompt.prompt_ids, "7", settings.rollout.sampling, 2, (0,), "a row"))
    assert asked[3:] == [False, False]


def test_the_option_decides_the_server_argument(tmp_path: Path) -> None:
    settings = service_settings(tmp_path, tmp_path, rollout={"router_replay": True}, routing=ROUTING)
    assert "--enable-return-routed-experts" in argument_list(server_arguments(settings, "cuda", "m", 0, 0))
    by_hand = service_settings(tmp_path, tmp_path, sglang={"enable-return-routed-experts": True})
    with pytest.raises(ValueError, match=r"sglang\.enable-return-routed-experts .* rollout\.router_replay"):
        server_arguments(by_hand, "cuda", "m", 0, 0)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="router_replay=true for a model without routed experts"):
        service_settings(tmp_path, tmp_path, rollout={"router_replay": True})
