"""What a custom reward function may take and return, and what is said when it does otherwise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollout_service.config import RewardSection
from rollout_service.rewards import Item
from rollout_service.rewards.contract import ContractError, load_function, request_of

HERE = "tests.reward_functions"


@pytest.mark.parametrize(
    ("name", "inputs", "per_group", "is_async"),
    [
        ("length", ("response",), False, False),
        ("with_everything", ("prompt", "gold", "response", "truncated"), False, False),
        ("shortest_of_group", ("gold", "responses"), True, False),
        ("judge", ("gold", "response"), False, True),
        ("judge_group", ("responses",), True, True),
    ],
)
def test_the_signature_tells_how_a_function_is_called(
    name: str, inputs: tuple[str, ...], per_group: bool, is_async: bool
) -> None:
    function = load_function(f"{HERE}:{name}")
    assert (function.inputs, function.per_group, function.is_async) == (inputs, per_group, is_async)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("no_such_module:f", "cannot load no_such_module:f: ModuleNotFoundError"),
        (f"{HERE}:nothing", f"cannot load {HERE}:nothing: AttributeError"),
        (f"{HERE}:not_a_function", r"is 7 \(int\), not a function"),
        (f"{HERE}:asks_for_more", r"takes \(response, ground_truth\)"),
        (f"{HERE}:knows_no_response", r"takes \(gold\); a reward function takes `response`"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(rule: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        load_function(rule)


def test_a_module_in_the_current_folder_is_found_but_hides_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_reward.py").write_text("def f(response):\n    return 1\n")
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_function("my_own_reward:f").call({"response": "x"}) == 1
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (1, (1.0, None)),
        (True, (1.0, None)),
        (np.float32(0.5), (0.5, None)),
        ((0.25, "34"), (0.25, "34")),
        ((0, None), (0.0, None)),
    ],
)
def test_numbers_and_pairs_are_results(result: Any, verdict: tuple[float, str | None]) -> None:
    assert load_function(f"{HERE}:length").verdicts(result, 1) == [verdict]


@pytest.mark.parametrize("result", [None, "1.0", {"score": 1}, float("nan"), float("inf"), (1.0, 34), [1.0], (1, 2, 3)])
def test_anything_else_is_refused_with_the_functions_name_and_the_result(result: Any) -> None:
    with pytest.raises(ContractError) as caught:
        load_function(f"{HERE}:length").verdicts(result, 1)
    assert str(caught.value).startswith(f"{HERE}:length returned {result!r} ({type(result).__name__}); expected")


@pytest.mark.parametrize("result", [1.0, [1.0], [1.0, "x"], "ab", None])
def test_a_group_needs_one_result_for_each_response(result: Any) -> None:
    with pytest.raises(ContractError, match="shortest_of_group returned"):
        load_function(f"{HERE}:shortest_of_group").verdicts(result, 2)


def test_a_group_may_answer_with_an_array() -> None:
    function = load_function(f"{HERE}:shortest_of_group")
    assert function.verdicts(np.array([0.5, 1.0]), 2) == [(0.5, None), (1.0, None)]
    request = request_of([Item("7", "7", False), Item("7", "= 7", True)], per_group=True)
    assert request == {"prompt": "", "gold": "7", "responses": ["7", "= 7"], "truncated": [False, True]}
    assert function.call(request) == [1.0, 0.0]


@pytest.mark.parametrize("rule", ["math-verify", "my.module", "a b:c", "ftp://x/y", "", ":f", "m:"])
def test_the_configuration_refuses_what_is_no_rule(rule: str) -> None:
    with pytest.raises(ValidationError, match="is no reward rule: give one of math_verify, dapo_exact"):
        RewardSection(rule=rule)


def test_the_configuration_refuses_a_rule_given_twice() -> None:
    with pytest.raises(ValidationError, match="math_verify is given twice"):
        RewardSection(extra_rules=[{"rule": "math_verify"}])  # type: ignore[list-item]
