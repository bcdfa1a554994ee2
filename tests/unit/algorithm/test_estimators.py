"""Advantage estimators by name: against the reference, on unequal, constant and single groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm import advantage_estimator, estimate_advantages
from dapo_megatron.algorithm.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from dapo_megatron.config import algorithm_section
from tests.unit.algorithm import reference

NAMES = sorted(ADVANTAGE_ESTIMATORS)
GROUP = st.lists(
    st.one_of(st.sampled_from([-1.0, 1.0, -2.0, 0.0]), st.integers(-64, 64).map(lambda i: i / 32)),
    min_size=1,
    max_size=9,
)


def estimate(name: str, groups: list[list[float]], eps: float = 1e-6, std: str = "sample") -> torch.Tensor:
    tensors = [torch.tensor(group) for group in groups]
    return estimate_advantages(advantage_estimator(name), tensors, eps=eps, std=std)  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.lists(GROUP, min_size=1, max_size=6), st.sampled_from(["sample", "population"]))
def test_equals_the_reference(name: str, groups: list[list[float]], std: str) -> None:
    want = reference.estimated_advantages(name, groups, 1e-6, 1 if std == "sample" else 0)
    got = estimate(name, groups, std=std)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dapo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [2.0, -2 / 3, -2 / 3, -2 / 3]),
        ("reinforce_plus_plus", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_one_right_of_four(name: str, expected: list[float]) -> None:
    assert estimate(name, [[1.0, -1.0, -1.0, -1.0]], eps=0.0).tolist() == pytest.approx(expected)


def test_the_population_standard_deviation_divides_by_n() -> None:
    assert estimate("grpo", [[1.0, -1.0]], eps=0.0, std="population").tolist() == pytest.approx([1.0, -1.0])
    assert estimate("grpo", [[1.0, -1.0]], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_single_and_constant_groups_get_exactly_zero_beside_an_informative_one(name: str) -> None:
    got = estimate(name, [[1.0], [-1.0] * 5, [0.1 + 0.2, 0.3], [1.0, -1.0]], eps=0.0)
    assert got[:8].tolist() == [0.0] * 8 and got[8] > 0 > got[9]


def test_batch_normalisation_ignores_groups() -> None:
    split, whole = (
        estimate("reinforce_plus_plus", [[1.0, 1.0], [-1.0]]),
        estimate("reinforce_plus_plus", [[1.0, 1.0, -1.0]]),
    )
    assert torch.equal(split, whole) and split[0] > 0
    assert estimate("reinforce_plus_plus", [[1.0, 1.0], [1.0]]).tolist() == [0.0] * 3
    assert estimate("reinforce_plus_plus", [[1.0]]).tolist() == [0.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_that_is_not_finite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"reward at \[2\] is not finite"):
        estimate(name, [[1.0, -1.0], [float("nan"), 1.0]])


def test_no_group_at_all() -> None:
    assert estimate("grpo", []).shape == (0,)


def test_an_estimator_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"returned \(1,\) for rewards of shape \(2,\)"):
        estimate_advantages(lambda r, g, *, eps, std: r[:1], [torch.ones(2)], eps=0.0, std="sample")
    with pytest.raises(ValueError, match=r"not finite for sample \[0, 1\]"):
        estimate_advantages(lambda r, g, *, eps, std: r / 0, [torch.ones(2)], eps=0.0, std="sample")


def test_the_names_that_the_configuration_accepts_are_the_registered_ones() -> None:
    assert set(algorithm_section.ADVANTAGE_ESTIMATORS) == set(ADVANTAGE_ESTIMATORS)
    assert set(algorithm_section.POLICY_LOSSES) == set(POLICY_LOSSES)
