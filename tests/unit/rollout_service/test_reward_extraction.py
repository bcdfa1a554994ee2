"""Where the final answer stands in a response, and its spelling."""

from __future__ import annotations

import time

import pytest

from rollout_service.rewards.extraction import canonical_number, clean, final_answer

FOUND = [
    ("Answer: 34", "34"),
    ("so\n**Answer:** 34", "34"),
    ("**Final answer**: 34", "34"),
    ("ANSWER : 34", "34"),
    ("Answer: 3\nno,\nAnswer: 34", "34"),
    ("Answer:\n34\n", "34"),
    ("Answer: \\boxed{34}", "34"),
    ("Answer: it is \\boxed{34}, as shown", "34"),
    ("Answer: \\[\n\\boxed{34}\n\\]", "34"),
    ("Answer:\n$$\n34\n$$\nDone.", "34"),
    ("Answer: \\boxed{\\begin{pmatrix}1\\\\\n2\\end{pmatrix}}", "\\begin{pmatrix}1\\\\\n2\\end{pmatrix}"),
    ("\\boxed{5}\nAnswer: 34", "34"),
    ("Answer: 34\nso \\boxed{5}", "34"),
    ("\\boxed{3}. Wait, no: \\boxed{7}", "7"),
    ("\\boxed{1} then \\boxed{204}", "204"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
    ("\\boxed{ unclosed, then \\boxed{7}", "7"),
    ("\\boxed 5.", "5"),
    ("\\fbox{5}", "5"),
    ("48/2 = 24\n#### 72", "72"),
    ("#### 1\n#### 72\n", "72"),
    ("We find 204 first, then more text", None),
    ("the answer is 204", None),
    ("", None),
    ("Answer:", None),
    ("Answer: \n\n", None),
    ("\\boxed{7} and then \\boxed{}", None),
    ("\\boxed{7} and then \\boxed{", None),
    ("Answer: \\boxed{7", None),
    ("my answers: 3, 4", None),
]


@pytest.mark.parametrize(("response", "expected"), FOUND)
def test_final_answer(response: str, expected: str | None) -> None:
    assert final_answer(response) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 34\n", "34"),
        ("Answer: 34", None),  # may be the beginning of 345
        ("Answer: $34$", None),
        ("Answer: \\boxed{34}", "34"),
        ("so $\\boxed{34}$.", "34"),
        ("\\boxed{34} is an intermediate value, from which we", None),
        ("Answer: 34\nLet me check that: 3", None),
        ("\\boxed{3", None),
        ("#### 72", None),
        ("#### 72\n", "72"),
        ("Answer: \\[ 34 \\]", "34"),
    ],
)
def test_a_truncated_response_counts_only_with_a_complete_answer_at_its_end(
    response: str, expected: str | None
) -> None:
    assert final_answer(response, truncated=True) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("Answer: 34", "34"),
        ("Let me see.\n  **Final Answer:** 34\n", "34"),
        ("Answer:\n34", "34"),
        ("Answer: 33\nAnswer: 34\nDone.", "34"),
        ("\\boxed{34}", None),
        ("#### 34", None),
        ("so the right answer: 34", None),
        ("Answer: 34\nNo, the answer: 35", None),  # the last one decides, and stands in the wrong place
    ],
)
def test_strict_extraction_wants_an_answer_line(response: str, expected: str | None) -> None:
    assert final_answer(response, extraction="strict") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" $34$. ", "34"),
        ("**34**", "34"),
        ("\\$18", "18"),
        ("+204", "204"),
        ("\u22125", "-5"),
        ("\u20135", "-5"),
        ("\uff13\uff14", "34"),
        ("1\\,000", "1000"),
        ("1{,}000", "1000"),
        ("1,\\!000", "1000"),
        ("12 345 678", "12345678"),
        ("\\text{Evelyn}", "Evelyn"),
        ("\\textbf{\\text{Evelyn}}", "\\textbf{\\text{Evelyn}}"),
        ("The answer is: 34", "34"),
        ("34\\quad.", "34"),
        ("5!", "5!"),
        ("\\( x = 5 \\)", "x = 5"),
        ("3,4", "3,4"),
        ("{{7}}", "7"),
        ("{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("{1}{2}", "{1}{2}"),
        ("\\{1,2\\}", "\\{1,2\\}"),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert clean(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("034", "34"),
        ("34.0", "34"),
        ("+34", "34"),
        ("- 5", "-5"),
        ("-0", "0"),
        (".50", "0.5"),
        ("1,234,567.80", "1234567.8"),
        ("3.4e1", "34"),
        ("1e-3", "0.001"),
        ("12345e-2", "123.45"),
        ("9" * 5000, "9" * 5000),
        ("1e400", "1" + "0" * 400),
        ("3,4", None),
        ("1,00", None),
        ("12,34,567", None),
        ("x", None),
        ("", None),
        (".", None),
        ("-", None),
        ("1/2", None),
        ("\u0663", None),
    ],
)
def test_canonical_number(text: str, expected: str | None) -> None:
    assert canonical_number(text) == expected


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 30_000,
        "\\boxed{" * 30_000 + "}" * 30_000,
        "answer " * 30_000,
        "Answer: " + " " * 200_000 + "34",
        "Answer: 34" + ". " * 100_000 + "x",
        "{" * 200_000 + "\\boxed{34}",
        "Answer: " + "{" * 100_000 + "\n" + "\\boxed{7}" * 20_000,
        "#### " * 40_000,
    ],
)
def test_long_hostile_text_takes_linear_time(response: str) -> None:
    began = time.perf_counter()
    clean(final_answer(response) or "")
    assert time.perf_counter() - began < 2.0
