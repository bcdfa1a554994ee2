"""The reward rules on a table of `(gold, response, expected)`, with the real math-verify library."""

from __future__ import annotations

import threading

import pytest

from rollout_service.rewards.rules import dapo_exact, math_verify, minerva_normal


def box(answer: str) -> str:
    return f"Hence the result is \\boxed{{{answer}}}."


RIGHT = [
    # one integer, many spellings
    ("34", box("34")),
    ("34", box("34.")),
    ("34", box("34.0")),
    ("34", box("034")),
    ("34", box("(34)")),
    ("34", box("$34$")),
    ("34", box("\\$34")),
    ("34", box("+34")),
    ("34", box("\uff13\uff14")),
    ("34", box("\\text{34}")),
    ("34", box("\\mathbf{34}")),
    ("34", box("34 apples")),
    ("34", box("34 \\text{ apples}")),
    ("34", box("34 dollars")),
    ("34", box("34\\,\\mathrm{km}")),
    ("34", box("34 \\text{ cm}^2")),
    ("34", box("34^\\circ")),
    ("34", box("3.4e1")),
    ("34", box("\\frac{68}{2}")),
    ("34", box("2\\cdot 17")),
    ("34", box("\\sqrt{1156}")),
    ("34", box("x = 34")),
    ("34", box("m+n = 34")),
    ("34", box("\\text{Area} = 34")),
    ("34", "**Answer:** 34"),
    ("34", "**Answer: 34**"),
    ("34", "Answer: \\boxed{34}."),
    ("34", "Answer: The answer is 34."),
    ("-5", box("\u22125")),
    ("1000", box("1\\,000")),
    ("1000", box("1,000")),
    ("1,000", box("1000")),
    ("1000", box("1{,}000")),
    ("1000", box("1 000")),
    ("1000", box("1e3")),
    ("18", "He makes 9 * 2 = 18.\n#### 18"),
    ("18", "#### $18"),
    ("9" * 4400, box("9" * 4400)),
    # the answer that decides
    ("7", "\\boxed{3}. Wait, no: \\boxed{7}"),
    ("204", "\\boxed{1} then \\boxed{204}"),
    ("5", "\\boxed{4}\nAnswer: 5"),
    ("34", "word " * 20_000 + box("34")),
    # fractions, decimals, percentages
    ("0.5", box("\\frac12")),
    ("\\frac{1}{2}", box("0.5")),
    ("\\frac12", box("1/2")),
    ("3/4", box("\\frac34")),
    ("0.5", box("50\\%")),
    ("50\\%", box("50\\%")),
    ("50\\%", box("50")),
    ("10\\%", box("0.1")),
    ("\\frac{1}{3}", box("0.333333")),
    ("-\\frac{3}{4}", box("-0.75")),
    ("\\frac{3}{2}", box("1\\frac12")),
    ("0.001", box("10^{-3}")),
    ("\\frac{1}{2^{99}}", box("2^{-99}")),
    # expressions
    ("2\\sqrt{3}", box("\\sqrt{12}")),
    ("\\frac{\\sqrt{3}}{3}", box("\\frac{1}{\\sqrt3}")),
    ("\\pi", box("\u03c0")),
    ("1-\\frac1e", box("1-e^{-1}")),
    ("x^2-1", box("(x-1)(x+1)")),
    ("3 + 4i", box("4i+3")),
    ("2x+3", box("y=2x+3")),
    ("x=5", box("5")),
    ("\\infty", box("\\infty")),
    ("2516_8", box("2516_{8}")),
    # tuples, sets, intervals, matrices, words
    ("\\left( 3, \\frac{\\pi}{2} \\right)", box("(3,\\pi/2)")),
    ("(1,2]", box("(1,2]")),
    ("\\{1,2\\}", box("2, 1")),
    ("1 \\pm \\sqrt{19}", box("1+\\sqrt{19}, 1-\\sqrt{19}")),
    ("x<5", box("5>x")),
    (
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        box("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ),
    ("\\text{(A)}", box("A")),
    ("A", box("(A)")),
    ("Tuesday", box("\\text{Tuesday}")),
    ("\\text{Evelyn}", "Answer: Evelyn"),
]

WRONG = [
    ("34", box("35")),
    ("34", box("-34")),
    ("34", box("0.34")),
    ("34", box("34e1")),
    ("34", box("34i")),
    ("34", box("34!")),
    ("34", box("34x")),
    ("34", box("34 x")),
    ("34", box("34 million")),
    ("34", box("34_{5}")),
    ("34", box("9" * 5000)),
    ("34", box("\\frac{1}{0}")),
    ("34", box("\\infty")),
    ("34", box("}{")),
    ("3", box("11_2")),
    ("11", box("11_2")),
    # a number is no relation, percentage, interval, set or list
    ("5", box("4=5")),
    ("5", box("x=4=5")),
    ("5", box("5=5")),
    ("5", box("5<6")),
    ("5", box("x>5")),
    ("5", box("x \\in 5")),
    ("204", box("204\\%")),
    ("204", box("204 percent")),
    ("204", box("20400\\%")),
    ("204", box("[204,204]")),
    ("204", box("(204,204)")),
    ("204", box("\\{204\\}")),
    ("204", box("204, 204")),
    ("204", box("203 or 204")),
    ("204", box("203 \\text{ and } 204")),
    ("204", box("\\pm 204")),
    ("204", box("408:2")),
    ("50", box("50\\%")),
    ("34", box("3,4")),
    ("1", "Answer: 1e400"),
    ("\\frac{1}{2}", box("[\\frac12,\\frac12]")),
    ("\\frac{1}{2}", box("\\frac12, \\frac13")),
    # different tiny numbers
    ("\\frac{1}{2^{99}}", box("\\frac{1}{2^{98}}")),
    ("\\frac{1}{2004!}", box("\\frac{1}{2006!}")),
    ("0.000001", box("0.0000012")),
    ("10^{-8}", box("10^{-9}")),
    ("\\frac{1}{1000003}", box("\\frac{1}{1000033}")),
    ("1-\\frac1e", box("1+\\frac1e")),
    ("0", box("0.0000001")),
    ("0", box("10^{-20}")),
    ("(0,\\frac{1}{2^{99}})", box("(0,\\frac{1}{2^{98}})")),
    ("\\{0,\\frac{1}{2^{99}}\\}", box("\\{0,\\frac{1}{2^{98}}\\}")),
    ("\\frac{x}{2^{99}}", box("\\frac{x}{2^{98}}")),
    ("9" * 4400, box("9" * 4399 + "8")),
    ("3.14", box("3.14159")),
    ("\\frac{1}{3}", box("0.33")),
    # no answer, or not this one
    ("204", "We find 204 first, then more text"),
    ("204", ""),
    ("7", "\\boxed{7}, but let me see \\boxed{}"),
    ("7", "\\boxed{7}, but let me see \\boxed{"),
    ("3", "\\boxed{3}. Wait, no: \\boxed{7}"),
    ("1204", "\\boxed{1} then \\boxed{204}"),
    ("4", "\\boxed{4}\nAnswer: 5"),
    ("34", "Answer: 1 2 3 33 34"),
    # structure matters
    ("\\left( 3, \\frac{\\pi}{2} \\right)", box("(\\pi/2,3)")),
    ("(1,2]", box("[1,2]")),
    ("4210_5", box("4210_6")),
    (
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        box("\\begin{pmatrix}2\\\\1\\end{pmatrix}"),
    ),
    ("A", box("B")),
    ("\\text{Evelyn}", "Answer: Emma"),
    ("\\pi", box("&;)")),
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_right_answers_score_one(gold: str, response: str) -> None:
    assert math_verify(gold, response, False)[0] == 1.0


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_wrong_answers_score_zero(gold: str, response: str) -> None:
    assert math_verify(gold, response, False)[0] == 0.0


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
