"""The reward rules: pure functions `(gold, response, truncated) -> (acc, extracted)`.

`math_verify` compares values with the math-verify library, behind guards for what that library gets wrong
(version 0.9.0): it credits a relation, a percentage, an interval or a set for a plain number, drops base subscripts,
and calls different tiny numbers equal because it compares with absolute precision.
`dapo_exact` is the string rule of the paper's code, kept for comparison.

Neither function bounds its own time: hostile expressions run for minutes. `pool.RewardPool` runs them in processes
that it can kill. math-verify's own timeouts use SIGALRM, fail outside of a main thread, and are switched off.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from rollout_service.rewards.extraction import LENIENT, canonical_number, clean, final_answer
from rollout_service.rewards.rational import surely

Rule = Callable[[str, str, bool], tuple[float, str | None]]

# math-verify rounds decimals to six places; 0.333333 for 1/3 is off by a relative 1e-6.
DECIMAL_TOLERANCE = 2e-6
# Exact values are compared at 50 digits.
EXACT_DIGITS = 50
EXACT_TOLERANCE = 1e-30

# An answer so much longer than the gold one is not tried: parsing takes seconds, and is a way to waste them.
ANSWER_CHARS = 2000

_INTEGER = re.compile(r"-?[0-9]+")
_ASSIGNMENT = re.compile(r"([^=<>]*)=([^=<>]*)")
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|angle|triangle)(?![A-Za-z])")
_RELATION = re.compile(
    r"[=<>~\u2260\u2264\u2265\u2248\u2208]"
    r"|\\(?:leq?|geq?|neq?|lt|gt|approx|equiv|sim|simeq|cong|in|to|mid)(?![A-Za-z])"
)
_PERCENT = re.compile(r"%|\b(?:percent|percentage|pct)\b", re.IGNORECASE)
_COLLECTION = re.compile(
    r"[,;:&\[\]\u00b1\u222a]|\\\\|\\[{}]"
    r"|\\(?:pm|mp|cup|cap|lbrace|rbrace|lbrack|rbrack|setminus|land|lor|wedge|vee)(?![A-Za-z])"
    r"|\b(?:and|or|to)\b"
)
_BASE = re.compile(r"[0-9][0-9A-F]*\s*_\s*\{?\s*([0-9]+)")
_UNIT = re.compile(r"([+-]?[0-9][0-9,]*(?:\.[0-9]+)?)\s*(?:\\(?:text|mathrm)\s*\{\s*)?([A-Za-z][A-Za-z .]*?)\s*\}?")
# Words that change the value of the number before them.
_SCALE = re.compile(
    r"\b(?:percent\w*|pct|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|[mbt]n|k|pi|e|i|x|y|z)\b",
    re.IGNORECASE,
)


def math_verify(gold: str, response: str, truncated: bool, extraction: str = LENIENT) -> tuple[float, str | None]:
    """Score a response by the value of its final answer.

    Args:
        gold: gold answer as text (LaTeX or plain).
        response: decoded response.
        truncated: the response ended at its length limit; see `extraction.final_answer`.
        extraction: `strict` or `lenient`: where the answer may stand.

    Returns:
        `(acc, extracted)`: 1.0 or 0.0, and the answer as found (None when there is none, which is wrong).

    Raises:
        ValueError: the gold answer is empty.
    """
    gold_text = clean(gold)
    if not gold_text:
        raise ValueError(f"the gold answer {gold!r} is empty")
    extracted = final_answer(response, truncated, extraction)
    if extracted is None:
        return 0.0, None
    return float(_equal(gold_text, clean(extracted))), extracted


def _equal(gold: str, answer: str) -> bool:
    """Whether two cleaned answers mean the same."""
    if not answer:
        return False
    if _squeeze(gold) == _squeeze(answer):
        return True
    gold_number = canonical_number(gold)
    if not _RELATION.search(gold):
        answer = _assigned_value(answer)
    if gold_number is not None:
        answer = _without_unit(answer)
    answer_number = canonical_number(answer)
    if answer_number is not None:
        if gold_number == answer_number:
            return True
        answer = answer_number  # without thousands separators, which would look like a list below
    plain = surely(gold_number or gold, answer)
    if plain is not None:
        return plain
    if gold_number is not None and _INTEGER.fullmatch(gold_number):
        if answer_number is not None:
            return False
        if _PERCENT.search(answer) or _lists_more(gold, answer):
            return False
    if len(answer) > ANSWER_CHARS + 10 * len(gold):
        return False
    bases = _BASE.findall(answer)
    if bases and bases != _BASE.findall(gold):  # 11_2 is three, but the parser drops the base
        return False
    if gold.endswith("%") and answer_number is not None and answer_number == canonical_number(gold.rstrip("\\% ")):
        return True  # "what percentage": the sign may be left out
    gold_values = _parse_gold(gold_number or gold)
    if gold_values and all(_is_scalar(value) for value in gold_values) and _lists_more(gold, answer):
        return False
    answer_values = _parse(answer)
    if not gold_values or not answer_values:
        return bool(_words(gold)) and _words(gold) == _words(answer)
    return any(_same_value(g, a) for g in gold_values for a in answer_values)


def _squeeze(text: str) -> str:
    """Without white space, but for that between digits: `1 2` is not 12."""
    return re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", re.sub(r"(?<![0-9])\s+|\s+(?![0-9])", "", text))


def _words(text: str) -> str:
    """Letters and digits in lower case: how answers that are no mathematics are compared."""
    return re.sub(r"[^\w]+", " ", re.sub(r"\\text\s*\{", " ", text)).strip().casefold()


def _lists_more(gold: str, answer: str) -> bool:
    """Whether the answer is a relation or a collection while the gold answer is neither.

    Checked on the text, because the parser reads `[204,204]` as one value and stops silently at what it cannot read.
    """
    return any(form.search(answer) and not form.search(gold) for form in (_RELATION, _COLLECTION))


def _assigned_value(answer: str) -> str:
    """`x = 5` and `m+n = 5` name their value 5. `4 = 5` names nothing: its left side has no letter."""
    match = _ASSIGNMENT.fullmatch(answer)
    if match is None:
        return answer
    name = re.sub(r"\\(?!text)[A-Za-z]+", "", _GREEK.sub("a", match.group(1)))
    return clean(match.group(2)) if re.search(r"[A-Za-z]", name) else answer


def _without_unit(answer: str) -> str:
    """`18 dollars` and `18\\text{ cm}` are 18; `18 million`, `18 percent` and `18 x` are not."""
    match = _UNIT.fullmatch(answer)
    if match is None or _SCALE.search(match.group(2)) or _COLLECTION.search(match.group(2)):
        return answer
    return match.group(1)


@functools.cache
def _extraction_config() -> list[Any]:
    import logging

    from math_verify import LatexExtractionConfig

    # Its only messages here say, once per process, that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return [LatexExtractionConfig(boxed_match_priority=0)]


@functools.lru_cache(maxsize=256)
def _parse_gold(text: str) -> list[Any]:
    """The samples of a group share their gold answer."""
    return _parse(text)


def _parse(text: str) -> list[Any]:
    """SymPy values of a cleaned answer, in a box of our own so that nothing else can be picked up; [] if unreadable."""
    from math_verify import parse

    values: list[Any] = parse(
        f"\\boxed{{{text}}}",
        extraction_config=_extraction_config(),
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return values


def _same_value(gold: Any, answer: Any) -> bool:
    import sympy
    from math_verify import verify

    undefined = (sympy.nan, sympy.zoo)
    if any(value is bad for value in (gold, answer) for bad in undefined):
        return False  # 1/0 is no value; the comparison would raise
    if _is_scalar(gold):
        if not _is_scalar(answer):
            return False
        if gold.is_Integer and answer.has(sympy.UnevaluatedExpr):
            return False  # a percentage
    if not verify(gold, answer, timeout_seconds=None, raise_on_error=True):
        return False
    return _close(gold, answer)


def _is_scalar(value: Any) -> bool:
    import sympy

    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixExpr)


def _close(gold: Any, answer: Any) -> bool:
    """Whether two values that math-verify calls equal are also equal *relative to their size*.

    math-verify compares with absolute precision (six decimals, or 15 digits after chopping), so that 1/2^99 equals
    1/2^98 and 0.000001 equals 0.0000012. Values that cannot be evaluated keep math-verify's verdict.
    """
    import sympy

    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return all(any(_close(g, a) for a in answer.args) for g in gold.args)
    if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return all(_close(g, a) for g, a in zip(gold.flat(), answer.flat(), strict=True))
    if isinstance(gold, (sympy.Tuple, sympy.Interval)) and isinstance(answer, type(gold)):
        return all(_close(g, a) for g, a in zip(gold.args, answer.args, strict=True))
    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and gold.lhs == answer.lhs:
        return _close(gold.rhs, answer.rhs)
    if not (_is_scalar(gold) and _is_scalar(answer)):
        return True
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if {str(s) for s in gold.free_symbols} != {str(s) for s in answer.free_symbols}:
        return True
    # Any point serves: the values were already called equal, only their relative size is in question.
    names = {name: sympy.Rational(sympy.prime(i + 3), 7) for i, name in enumerate(sorted({str(s) for s in symbols}))}
    point = {s: names[str(s)] for s in symbols}
    g, a = (value.subs(point).doit().evalf(EXACT_DIGITS) for value in (gold, answer))
    if not (g.is_number and a.is_number and g.is_finite and a.is_finite):
        return True
    decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    size = max(abs(g), abs(a))
    return bool(abs(g - a) <= (DECIMAL_TOLERANCE if decimal else EXACT_TOLERANCE) * size)


# --- the paper's rule -------------------------------------------------------------------------------------------------

DAPO_WINDOW_CHARS = 300
_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
# The normalisation of Minerva (Lewkowycz et al. 2022, appendix D.1, listing 1), which the paper's code uses.
_MINERVA_SUBSTITUTIONS = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
]
_MINERVA_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples \\text{s} \\text{.} \\text{\ns} \\text{}^2 \\text{}^3 "
    '\\text{\n} \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)


def dapo_exact(gold: str, response: str, truncated: bool) -> tuple[float, str | None]:
    """The paper's rule: the last `Answer:` in the last 300 characters, normalised, equal as strings.

    It calls `34.`, `034`, `34.0` and `(34)` wrong for 34 and `3,4` right. Truncation plays no part in it.
    Arguments, result and errors as in `math_verify`; `extracted` is the normalised answer.
    """
    del truncated
    if not gold.strip():
        raise ValueError(f"the gold answer {gold!r} is empty")
    found = _DAPO_ANSWER.findall(response[-DAPO_WINDOW_CHARS:])
    if not found:
        return 0.0, None
    answer = minerva_normal(found[-1])
    return float(answer == minerva_normal(gold)), answer


def minerva_normal(answer: str) -> str:
    """Minerva's normal form of a final answer."""
    answer = answer.split("=")[-1]
    for old, new in _MINERVA_SUBSTITUTIONS:
        answer = answer.replace(old, new)
    for expression in _MINERVA_REMOVED.split(" "):
        answer = answer.replace(expression, "")
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)  # \frac12 -> \frac{1}{2}
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


RULES: dict[str, Rule] = {"math_verify": math_verify, "dapo_exact": dapo_exact}


def builtin_rule(name: str, extraction: str) -> Rule:
    """A rule of `RULES` with the configured extraction; `dapo_exact` has one of its own."""
    return functools.partial(math_verify, extraction=extraction) if name == "math_verify" else RULES[name]
