from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm import importance_weights
from tests.unit.algorithm import reference


@st.composite
def responses(draw: st.DrawFn):
    """Per response: a list of (old, behaviour, trained?) tokens; masked ones hold garbage."""
    out = []
    for _ in range(draw(st.integers(1, 6))):
        row = []
        for _ in range(draw(st.integers(1, 9))):
            keep = draw(st.booleans())
            old = draw(st.floats(-30, 0))
            diff = draw(st.one_of(st.floats(-0.5, 0.5), st.sampled_from([0.0, 80.0, -80.0, 5.0])))
            row.append(
                (old, old - diff, True)
                if keep
                else (draw(st.sampled_from([np.nan, np.inf, -np.inf])), draw(st.sampled_from([np.nan, 0.0])), False)
            )
        out.append(row)
    return out


def flat(rows):
    old, behaviour, mask = (np.array([t[k] for row in rows for t in row]) for k in range(3))
    segment = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return torch.tensor(old), torch.tensor(behaviour), torch.tensor(mask.astype(bool)), torch.tensor(segment)


@settings(deadline=None)
@given(responses(), st.sampled_from(["token", "sequence", "off"]), st.sampled_from([2.0, 1.0, 5.0]))
def test_equals_the_reference(rows, level, cap) -> None:
    out = importance_weights(*flat(rows), level, cap)
    want: list[float] = []
    diffs: list[float] = []
    for row in rows:
        kept = iter(reference.importance_weight([o - b for o, b, m in row if m], level, cap))
        want += [next(kept) if m else 0.0 for _, _, m in row]
        diffs += [o - b for o, b, m in row if m]
    np.testing.assert_allclose(out.weights.numpy(), want, rtol=1e-9, atol=0)
    x = np.array(diffs)
    y = np.clip(x, -20, 20)
    w = np.array(want)
    sums = {
        "tokens": len(x),
        "logprob_abs_diff": np.abs(x).sum(),
        "logprob_abs_diff_max": np.abs(x).max(initial=0.0),
        "k1_kl": -x.sum(),
        "k3_kl": (np.exp(y) - 1 - y).sum(),
        "is_weight": w.sum(),
        "is_weight_sq": (w**2).sum(),
        "is_masked": 0.0,
        "sequences": sum(any(m for _, _, m in row) for row in rows),
        "seq_rejected": 0.0,
        "seq_rejected_tokens": 0.0,
    }
    got = {k: float(v) for k, v in out.metrics.items()}
    capped = got.pop("is_capped")
    assert got == pytest.approx(sums, rel=1e-9, abs=1e-9)
    assert (capped > 0) == (level != "off" and bool((w == cap).any()) and capped > 0)


def test_truncation_at_the_cap_is_counted() -> None:
    old, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -1.0, -0.5])
    out = importance_weights(
        old, behaviour, torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), "token", 2.0
    )
    torch.testing.assert_close(out.weights, torch.tensor([2.0, 1.0, float(np.exp(-0.5))]))
    assert float(out.metrics["is_capped"]) == 1.0


def test_sequence_level_multiplies_over_the_response_only() -> None:
    old = torch.tensor([0.1, 0.2, -0.1, 0.3])
    out = importance_weights(
        old, torch.zeros(4), torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 1]), "sequence", 9.0
    )
    torch.testing.assert_close(
        out.weights, torch.tensor([np.exp(0.3), np.exp(0.3), np.exp(-0.1), 0.0], dtype=torch.float32)
    )


def test_equal_policies_give_weight_one_and_no_divergence() -> None:
    logprobs = torch.randn(50)
    out = importance_weights(
        logprobs, logprobs, torch.ones(50, dtype=torch.bool), torch.zeros(50, dtype=torch.long), "token", 2.0
    )
    assert out.weights.tolist() == [1.0] * 50
    assert float(out.metrics["k3_kl"]) == 0.0 == float(out.metrics["logprob_abs_diff"])
    assert float(out.metrics["is_weight"] ** 2 / (out.metrics["tokens"] * out.metrics["is_weight_sq"])) == 1.0


def test_weights_carry_no_gradient_and_keep_the_dtype() -> None:
    old = torch.zeros(3, requires_grad=True)
    out = importance_weights(
        old, torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long), "token", 2.0
    )
    assert not out.weights.requires_grad and out.weights.dtype == torch.float32


def test_no_token_at_all_is_fine() -> None:
    empty = torch.zeros(0)
    for level in ("token", "sequence", "off"):
        out = importance_weights(empty, empty, empty.bool(), empty.long(), level, 2.0)
        assert out.weights.shape == (0,) and float(out.metrics["logprob_abs_diff_max"]) == 0.0


def test_wrong_arguments_are_named() -> None:
    x, m, s = torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="unknown off-policy level 'group'"):
        importance_weights(x, x, m, s, "group", 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cap=0"):
        importance_weights(x, x, m, s, "token", 0.0)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(3,\)"):
        importance_weights(x, x, m, torch.zeros(3, dtype=torch.long), "token", 2.0)
