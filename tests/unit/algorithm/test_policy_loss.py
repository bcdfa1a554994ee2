from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm import decoupled_clip_loss
from tests.unit.algorithm import reference

GARBAGE = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38]
LOW, HIGH = 0.2, 0.28

# Log-ratios: ordinary, on-policy, beyond exp's range, and next to the clip limits, but not on a kink, where the gradient is a matter of taste.
KINKS = [math.log(1 - LOW), math.log(1 + HIGH), math.log(10.0), math.log(3.0), 20.0, -20.0]
LOG_RATIOS = st.one_of(
    st.sampled_from([0.0, 80.0, -80.0, 1e-4, 0.2, -0.2, 0.3]),
    st.integers(-768, 768).map(lambda i: i / 256),
    st.integers(-800, 800).map(lambda i: i / 32),
).filter(lambda d: all(abs(d - kink) > 1e-4 for kink in KINKS))


@st.composite
def tokens(draw: st.DrawFn) -> dict[str, np.ndarray]:
    n = draw(st.integers(1, 40))
    rows = [
        (
            draw(st.integers(-3000, 0).map(lambda i: i / 128)),
            draw(LOG_RATIOS),
            draw(st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.integers(-1024, 1024).map(lambda i: i / 256))),
            draw(st.booleans()),
            draw(st.sampled_from([1.0, 2.0, 0.5, 0.0, 1e-3])),
        )
        for _ in range(n)
    ]
    old, ratio, advantage, mask, weight = (np.array(column) for column in zip(*rows, strict=True))
    batch = {"logprobs": old + ratio, "old_logprobs": old, "advantages": advantage, "is_weights": weight}
    for values in batch.values():
        for i in np.flatnonzero(~mask):
            values[i] = draw(st.sampled_from([*GARBAGE, 0.0]))
    return {**batch, "mask": mask}


def run(batch: dict[str, np.ndarray], dtype: torch.dtype, clip_c: float | None, weighted: bool):
    tensors = {k: torch.tensor(v, dtype=torch.bool if k == "mask" else dtype) for k, v in batch.items()}
    if not weighted:
        del tensors["is_weights"]
    tensors["logprobs"].requires_grad_()
    out = decoupled_clip_loss(**tensors, clip_low=LOW, clip_high=HIGH, clip_c=clip_c)
    out.token_loss.sum().backward()
    return out, tensors["logprobs"].grad, {k: t.detach().double().numpy() for k, t in tensors.items()}


def expected(batch: dict[str, np.ndarray], clip_c: float | None) -> tuple[np.ndarray, np.ndarray]:
    pairs = [
        reference.token_loss_and_gradient(
            batch["logprobs"][i],
            batch["old_logprobs"][i],
            batch["advantages"][i],
            LOW,
            HIGH,
            clip_c,
            batch.get("is_weights", np.ones(len(batch["mask"])))[i],
        )
        if batch["mask"][i]
        else (0.0, 0.0)
        for i in range(len(batch["mask"]))
    ]
    loss, gradient = zip(*pairs, strict=True)
    return np.array(loss), np.array(gradient)


@settings(max_examples=200, deadline=None)
@given(tokens(), st.sampled_from([None, 3.0, 10.0]), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_loss_and_gradient_equal_the_reference(batch, clip_c, weighted, dtype) -> None:
    out, gradient, seen = run(batch, dtype, clip_c, weighted)
    loss_ref, gradient_ref = expected(seen, clip_c)
    # A float32 log-ratio of 20 carries a rounding error of 1e-6, which exp turns into a relative one.
    rtol = 1e-12 if dtype == torch.float64 else 3e-6
    np.testing.assert_allclose(out.token_loss.detach().numpy(), loss_ref, rtol=rtol, atol=0)
    np.testing.assert_allclose(gradient.numpy(), gradient_ref, rtol=rtol, atol=0)
    masked = ~torch.tensor(batch["mask"])
    assert (gradient[masked] == 0).all() and (out.token_loss[masked] == 0).all()


@settings(deadline=None)
@given(tokens())
def test_float32_within_the_usual_range_is_right_to_a_millionth(batch) -> None:
    keep, old = batch["mask"], batch["old_logprobs"]
    batch["logprobs"][keep] = old[keep] + np.clip(batch["logprobs"][keep] - old[keep], -0.9, 0.9)
    out, gradient, seen = run(batch, torch.float32, 10.0, True)
    loss_ref, gradient_ref = expected(seen, 10.0)
    np.testing.assert_allclose(out.token_loss.detach().numpy(), loss_ref, rtol=1e-6, atol=0)
    np.testing.assert_allclose(gradient.numpy(), gradient_ref, rtol=1e-6, atol=0)


@settings(deadline=None)
@given(tokens(), st.sampled_from([None, 3.0]))
def test_metrics_are_sums_over_unmasked_tokens(batch, clip_c) -> None:
    out, _, seen = run(batch, torch.float64, clip_c, False)
    keep = batch["mask"]
    d = np.zeros(len(keep))
    d[keep] = seen["logprobs"][keep] - seen["old_logprobs"][keep]
    ratio, a = np.exp(np.clip(d, -20, 20)), np.where(keep, seen["advantages"], 0.0)
    clipped = ((ratio > 1 + HIGH) & (a > 0)) | ((ratio < 1 - LOW) & (a < 0))
    cut = (a < 0) & (ratio > clip_c) if clip_c else np.zeros(len(a), dtype=bool)
    want = {
        "tokens": keep.sum(),
        "pg_clipfrac": (clipped & keep).sum(),
        "pg_clipfrac_lower": (cut & keep).sum(),
        "ppo_kl": -d.sum(),
        "ratio": ratio[keep].sum(),
        "log_ratio_clamped": (np.abs(d) > 20).sum(),
        "pg_loss": expected(seen, clip_c)[0].sum(),
    }
    assert {k: float(v) for k, v in out.metrics.items()} == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert not any(v.requires_grad for v in out.metrics.values())


def one(logprob: float, old: float, advantage: float, c: float | None = 10.0) -> tuple[float, float]:
    x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    out = decoupled_clip_loss(
        x, torch.tensor([old]).double(), torch.tensor([advantage]).double(), torch.tensor([True]), LOW, HIGH, c
    )
    out.token_loss.sum().backward()
    assert x.grad is not None
    return out.token_loss.item(), x.grad.item()


def test_the_clip_range_is_decoupled() -> None:
    assert one(math.log(1.27), 0.0, 1.0) == pytest.approx((-1.27, -1.27))  # beyond 1 + eps_low, still free to rise
    assert one(math.log(1.29), 0.0, 1.0) == pytest.approx((-1.28, 0.0))
    assert one(math.log(0.79), 0.0, -1.0) == pytest.approx((0.8, 0.0))
    assert one(math.log(0.5), 0.0, 1.0) == pytest.approx((-0.5, -0.5))  # never clipped on the pessimistic side


def test_dual_clip_bounds_a_runaway_ratio_of_a_bad_token() -> None:
    assert one(-1.0, -81.0, -2.0, c=10.0) == (20.0, 0.0)
    assert one(math.log(11.0), 0.0, -2.0, c=None) == pytest.approx((22.0, 22.0))
    assert one(-1.0, -81.0, 2.0, c=10.0) == pytest.approx((-2.56, 0.0))


def test_a_ratio_of_e_to_the_80_stays_finite_in_float32() -> None:
    x = torch.tensor([-0.5, -0.5], requires_grad=True)
    out = decoupled_clip_loss(
        x, torch.tensor([-80.5, -80.5]), torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool), LOW, HIGH, None
    )
    out.token_loss.sum().backward()
    assert x.grad is not None and torch.isfinite(out.token_loss).all() and torch.isfinite(x.grad).all()


def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_the_advantage() -> None:
    assert one(-3.0, -3.0, 0.75) == (-0.75, -0.75)


def test_an_unmasked_nan_is_not_hidden() -> None:
    x = torch.tensor([float("nan")])
    out = decoupled_clip_loss(x, torch.zeros(1), torch.ones(1), torch.ones(1, dtype=torch.bool), LOW, HIGH, 10.0)
    assert out.token_loss.isnan().all() and out.metrics["pg_loss"].isnan()


def test_no_token_at_all_is_fine() -> None:
    x = torch.zeros(0, requires_grad=True)
    out = decoupled_clip_loss(x, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool), LOW, HIGH, 10.0)
    out.token_loss.sum().backward()
    assert float(out.metrics["tokens"]) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_c": 1.0}, "clip_c=1.0 must be above 1"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask has shape \(3,\)"),
        ({"is_weights": torch.ones(1)}, r"is_weights has shape \(1,\)"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    good = {
        "logprobs": torch.zeros(2),
        "old_logprobs": torch.zeros(2),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, dtype=torch.bool),
        "clip_low": LOW,
        "clip_high": HIGH,
        "clip_c": 10.0,
    }
    with pytest.raises(ValueError, match=message):
        decoupled_clip_loss(**{**good, **change})
