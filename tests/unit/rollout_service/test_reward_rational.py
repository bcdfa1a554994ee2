"""Plain fractions and decimals without algebra."""

from __future__ import annotations

from fractions import Fraction

import pytest

from rollout_service.rewards.rational import rational, surely


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", Fraction(12)),
        ("-0.75", Fraction(-3, 4)),
        (".5", Fraction(1, 2)),
        ("6/8", Fraction(3, 4)),
        ("-6 / 8", Fraction(-3, 4)),
        ("\\frac34", Fraction(3, 4)),
        ("\\frac3{40}", Fraction(3, 40)),
        ("-\\dfrac{-6}{8}", Fraction(3, 4)),
        ("\\tfrac{3}{-4}", Fraction(-3, 4)),
        ("\\frac{1}{0}", None),
        ("1/0", None),
        ("\\frac{x}{2}", None),
        ("1\\frac12", None),
        ("2^3", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_rational(text: str, value: Fraction | None) -> None:
    assert rational(text) == value


def test_only_a_rounded_decimal_near_the_value_is_left_open() -> None:
    assert surely("\\frac{1}{3}", "0.333333") is None
    assert surely("\\frac{1}{3}", "0.33") is False
    assert surely("\\frac{1000000}{1000001}", "1") is False
    assert surely("0.5", "\\frac12") is True
    assert surely("0", "0.0000001") is False
    assert surely("0.5", "50\\%") is None
