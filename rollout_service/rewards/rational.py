"""Plain fractions and decimals as exact numbers: most answers need no algebra, which takes milliseconds."""

from __future__ import annotations

import re
from fractions import Fraction

# Longer ones are rare, and `int` refuses more than 4300 digits.
MAX_CHARS = 80
# A rounded decimal this far from the exact value (relative) may still count as equal; the full comparison decides.
NEAR = Fraction(1, 10**5)

_DIGITS = r"(?:\{\s*([+-]?[0-9]+)\s*\}|([0-9]))"
_TEX = re.compile(rf"([+-]?)\s*\\[dt]?frac\s*{_DIGITS}\s*{_DIGITS}")
_SLASH = re.compile(r"([+-]?[0-9]+)\s*/\s*([0-9]+)")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def rational(text: str) -> Fraction | None:
    """The value of `\\\\frac{3}{4}`, `\\\\frac34`, `3/4`, `-0.75` or `12`; None for anything else.

    >>> rational("-\\\\dfrac{6}{8}")
    Fraction(-3, 4)
    """
    if len(text) > MAX_CHARS:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _SLASH.fullmatch(text):
        above, below = match.groups()
    elif match := _TEX.fullmatch(text):
        sign, *digits = match.groups()
        above, below = digits[0] or digits[1], digits[2] or digits[3]
        if sign == "-":
            return -value if (value := _ratio(above, below)) is not None else None
    else:
        return None
    return _ratio(above, below)


def _ratio(above: str, below: str) -> Fraction | None:
    return Fraction(int(above), int(below)) if int(below) else None


def surely(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal; None when one is none, or when a rounded decimal is near the other."""
    g, a = rational(gold), rational(answer)
    if g is None or a is None:
        return None
    if g == a:
        return True
    rounded = "." in gold or "." in answer
    return None if rounded and abs(g - a) <= NEAR * max(abs(g), abs(a)) else False
