"""The reward rules on a table of `(gold, response, expected)`, with the real math-verify library."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout_service.rewards.rules import dapo_exact, math_verify, minerva_normal


def box(answer: str) -> str:
    return f"Hence the result is \\boxed{{{answer}}}."


CASES = [json.loads(line) for line in (Path(__file__).parents[2] / "data" / "reward_cases.jsonl").open()]
# The kinds that the table must cover, so that none is lost in an edit.
KINDS = {
    "choice",
    "decimal",
    "fraction",
    "general",
    "hack",
    "huge integer",
    "interval",
    "matrix",
    "multiple boxes",
    "negative zero",
    "percentage",
    "set",
    "spacing",
    "strict",
    "thousands",
    "trailing text",
    "truncated",
    "tuple",
    "unicode",
    "unit",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{case['gold'][:20]}")
def test_math_verify_on_the_table(case: dict[str, Any]) -> None:
    extraction = case.get("extraction", "lenient")
    acc, _ = math_verify(case["gold"], case["response"], case.get("truncated", False), extraction)
    assert acc == case["expected"]


def test_the_table_covers_every_kind_and_both_verdicts() -> None:
    assert {case["kind"] for case in CASES} == KINDS
    assert len(CASES) >= 150
    one_sided = {kind for kind in KINDS if len({case["expected"] for case in CASES if case["kind"] == kind}) < 2}
    assert one_sided == {"hack"}  # which all score 0
    assert {case["expected"] for case in CASES if case["kind"] == "hack"} == {0}


def test_the_extracted_answer_is_reported_as_it_stands() -> None:
    assert math_verify("34", "Answer: 0034 apples.", False) == (1.0, "0034 apples.")
    assert math_verify("34", "nothing", False) == (0.0, None)


def test_a_truncated_response_is_not_right_by_an_intermediate_or_cut_value() -> None:
    assert math_verify("34", "\\boxed{34} is the first part; then", True) == (0.0, None)
    assert math_verify("34", "Answer: 34", True) == (0.0, None)  # perhaps 345
    assert math_verify("34", "so \\boxed{34}", True) == (1.0, "34")


def test_an_empty_gold_answer_is_an_error_not_a_verdict() -> None:
    for rule in (math_verify, dapo_exact):
        with pytest.raises(ValueError, match="gold answer"):
            rule("  ", box("34"), False)


def test_the_rule_works_outside_of_the_main_thread() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(math_verify("\\frac12", box("\\frac{2}{4}"), False)[0]))
    thread.start()
    thread.join(30)
    assert results == [1.0]


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        ("34", "Answer: 34", 1.0),
        ("34", "answer:34", 1.0),
        ("34", "Answer: $34$", 1.0),
        ("34", "Answer: \\boxed{34}", 1.0),
        ("34", "Answer: x = 34", 1.0),
        ("34", "Answer: 34 dollars", 1.0),
        ("34", "Answer: 3,4", 1.0),
        ("1,000", "Answer: 1000", 1.0),
        ("\\frac{1}{2}", "Answer: $\\frac12$", 1.0),
        ("34", "Answer: 33\nAnswer: 34", 1.0),
        ("34", "Answer: 34.", 0.0),
        ("34", "Answer: **34**", 0.0),
        ("34", "**Answer:** 34", 0.0),
        ("34", "Answer: 034", 0.0),
        ("34", "Answer: 34.0", 0.0),
        ("34", "Answer: (34)", 0.0),
        ("34", "\\boxed{34}", 0.0),
        ("34", "Answer: 34\n" + "x" * 300, 0.0),  # outside of the last 300 characters
    ],
)
def test_dapo_exact_is_the_papers_string_rule(gold: str, response: str, expected: float) -> None:
    assert dapo_exact(gold, response, False)[0] == expected


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("\\frac12", "frac{1}{2}".join(["\\", ""])),
        ("\\sqrt2", "\\sqrt{2}"),
        ("\\text{even}", "even"),
        ("a square", ""),
        ("2 = 1 + 1", "1+1"),
    ],
)
def test_minerva_normal_form(text: str, normal: str) -> None:
    assert minerva_normal(text) == normal
