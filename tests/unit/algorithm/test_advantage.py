from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm import group_advantages
from tests.unit.algorithm import reference

REWARDS = st.lists(
    st.one_of(st.sampled_from([-1.0, 1.0, -2.0, 0.0]), st.integers(-64, 64).map(lambda i: i / 32)),
    min_size=1,
    max_size=24,
)


@settings(deadline=None)
@given(REWARDS)
def test_equals_the_reference(rewards: list[float]) -> None:
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), 1e-6)
    np.testing.assert_allclose(got.numpy(), reference.advantages(rewards, 1e-6), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(REWARDS, st.randoms())
def test_permuting_samples_permutes_advantages(rewards: list[float], random) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    r = torch.tensor(rewards)
    torch.testing.assert_close(group_advantages(r, 1e-6)[order], group_advantages(r[order], 1e-6), rtol=1e-6, atol=1e-6)


def test_one_right_of_four_with_unbiased_std() -> None:
    got = group_advantages(torch.tensor([1.0, -1.0, -1.0, -1.0]), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([1.5, -0.5, -0.5, -0.5]))


def test_eps_is_added_to_the_standard_deviation() -> None:
    got = group_advantages(torch.tensor([1.0, -1.0], dtype=torch.float64), eps=0.5)
    assert got.tolist() == pytest.approx([1 / (2**0.5 + 0.5), -1 / (2**0.5 + 0.5)])


@pytest.mark.parametrize("rewards", [[1.0], [-1.0] * 8, [0.1 + 0.2, 0.3], [1e30, 1e30]])
def test_single_and_constant_groups_get_exactly_zero(rewards: list[float]) -> None:
    assert group_advantages(torch.tensor(rewards, dtype=torch.float64), eps=0.0).tolist() == [0.0] * len(rewards)


def test_groups_do_not_mix() -> None:
    a, b = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.5, -1.0])
    expected = torch.cat([group_advantages(a), group_advantages(b)])
    assert torch.equal(group_advantages([a, b]), expected)
    assert torch.equal(group_advantages(torch.stack([a, -a])), torch.stack([group_advantages(a), group_advantages(-a)]))
    assert group_advantages([]).shape == (0,)


def test_integer_rewards_give_float32() -> None:
    assert group_advantages(torch.tensor([1, 0, 0])).dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    with pytest.raises(ValueError, match=r"reward at \[1\] is not finite"):
        group_advantages(torch.tensor([1.0, bad, -1.0]))
