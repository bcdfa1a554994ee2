"""The whole loss of every policy loss, correction, KL and entropy setting against float64 NumPy, and its invariances."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dapo_megatron.algorithm import Objective, PolicyLossOutput, TokenBatch, token_weights
from dapo_megatron.config.algorithm_section import AlgorithmSection
from tests.unit.algorithm import reference

GARBAGE = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 0.0]
LOG_RATIOS = st.one_of(
    st.sampled_from([0.0, 80.0, -80.0, 1e-4, 0.2, -0.2, 0.3]),
    st.integers(-768, 768).map(lambda i: i / 256),
    st.integers(-3000, 3000).map(lambda i: i / 128),
)


@st.composite
def algorithms(draw: st.DrawFn) -> AlgorithmSection:
    level = draw(st.sampled_from(["token", "sequence", "off"]))
    bypass = draw(st.integers(0, 4)) == 0
    off_policy = {
        "level": level,
        "cap": draw(st.sampled_from([2.0, 1.0, 5.0])),
        "mode": "bypass" if bypass else "decoupled",
    }
    if not bypass:
        if level != "off" and draw(st.booleans()):
            off_policy |= {"bound": "mask", "mask_low": draw(st.sampled_from([0.0, 0.5])), "mask_high": 3.0}
        off_policy |= draw(
            st.sampled_from(
                [{}, {"geometric_low": 0.7}, {"geometric_high": 1.5}, {"geometric_low": 0.7, "geometric_high": 1.5}]
            )
        )
    return AlgorithmSection.model_validate(
        {
            "policy_loss": draw(st.sampled_from(["clip", "gspo", "cispo", "pg"])),
            "clip_ratio_low": draw(st.sampled_from([0.2, 1.0, 0.0])),
            "clip_ratio_c": draw(st.sampled_from([None, 3.0, 10.0])),
            "entropy_coef": draw(st.sampled_from([0.0, 0.01, 1.0])),
            "kl": {
                "coef": draw(st.sampled_from([0.0, 0.001, 1.0])),
                "kind": draw(st.sampled_from(["k1", "k2", "k3", "low_var_kl"])),
            },
            "off_policy": off_policy,
        }
    )


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    """Responses of 1 to 9 tokens, some wholly masked; masked positions hold anything."""
    columns: dict[str, list[float]] = {f.name: [] for f in fields(TokenBatch)}
    responses = draw(st.integers(0, 6))
    lengths = []
    for response in range(responses):
        trained = draw(st.integers(0, 3)) > 0
        advantage = draw(st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.integers(-1024, 1024).map(lambda i: i / 256)))
        kept = 0
        for _ in range(draw(st.integers(1, 9))):
            keep = trained and draw(st.integers(0, 4)) > 0
            kept += keep
            old = draw(st.integers(-3000, 0)) / 128
            values = {
                "logprobs": old + draw(LOG_RATIOS),
                "behaviour_logprobs": old - draw(LOG_RATIOS),
                "old_logprobs": old,
                "ref_logprobs": old + draw(LOG_RATIOS),
                "entropy": draw(st.integers(0, 500)) / 128,
                "advantages": advantage,
            }
            for name in values:
                columns[name].append(values[name] if keep else draw(st.sampled_from(GARBAGE)))
            columns["mask"].append(keep)
            columns["sequence_ids"].append(response)
        lengths.append(kept)
    per_sample = token_weights("token-mean", torch.tensor(lengths, dtype=torch.int64), torch.arange(responses), 9)
    dtypes = {"mask": torch.bool, "sequence_ids": torch.int64}
    tensors = {
        name: torch.tensor(v, dtype=dtypes.get(name, torch.float64)) for name, v in columns.items() if name != "weights"
    }
    return TokenBatch(**tensors, weights=per_sample[tensors["sequence_ids"]])


def rows(batch: TokenBatch, index: torch.Tensor) -> TokenBatch:
    """Some rows of a batch; gradients flow to its tensors."""
    return TokenBatch(**{f.name: getattr(batch, f.name)[index] for f in fields(TokenBatch)})


def evaluate(algorithm: AlgorithmSection, batch: TokenBatch, split: list[torch.Tensor] | None = None):
    """Loss, gradients of log-probs and entropies, and metric sums, over one or more micro-batches."""
    batch = replace(
        batch, logprobs=batch.logprobs.clone().requires_grad_(), entropy=batch.entropy.clone().requires_grad_()
    )
    objective = Objective(algorithm)
    loss, sums = 0.0, {}
    for index in split or [torch.arange(len(batch.mask))]:
        part, metrics = objective(rows(batch, index))
        part.backward()
        loss += part.item()
        for key, value in metrics.items():
            assert not value.requires_grad
            sums[key] = (
                max(sums.get(key, 0.0), float(value)) if key.endswith("_max") else sums.get(key, 0.0) + float(value)
            )
    zeros = torch.zeros_like(batch.mask, dtype=torch.float64)
    gradients = [zeros if x.grad is None else x.grad for x in (batch.logprobs, batch.entropy)]
    return loss, gradients[0], gradients[1], sums


def expected(algorithm: AlgorithmSection, batch: TokenBatch):
    """The same from the formulas, token by token; also the size of the terms and whether a token sits on a kink."""
    a, off = algorithm, algorithm.off_policy
    n = len(batch.mask)
    column = {f.name: getattr(batch, f.name).tolist() for f in fields(TokenBatch)}
    old = column["behaviour_logprobs"] if off.mode == "bypass" else column["old_logprobs"]
    loss, terms, d_logprob, d_entropy = [], 0.0, np.zeros(n), np.zeros(n)
    for response in sorted(set(column["sequence_ids"])):
        kept = [t for t in range(n) if column["sequence_ids"][t] == response and column["mask"][t]]
        diffs = [old[t] - column["behaviour_logprobs"][t] for t in kept]
        weights = (
            [1.0] * len(kept)
            if off.mode == "bypass"
            else reference.correction_weights(diffs, off.level, off.cap, off.mask_band, off.geometric_band)
        )
        losses, gradients = reference.response_loss_and_gradient(
            a.policy_loss,
            [column["logprobs"][t] for t in kept],
            [old[t] for t in kept],
            [column["advantages"][t] for t in kept],
            weights,
            a.clip_ratio_low,
            a.clip_ratio_high,
            a.clip_ratio_c,
        )
        for t, token_loss, gradient in zip(kept, losses, gradients, strict=True):
            w = column["weights"][t]
            kl, d_kl = reference.kl_and_gradient(a.kl.kind, column["logprobs"][t], column["ref_logprobs"][t])
            parts = [w * token_loss, w * a.kl.coef * kl, -w * a.entropy_coef * column["entropy"][t]]
            loss += parts
            terms += sum(abs(part) for part in parts)
            d_logprob[t] = w * (gradient + a.kl.coef * d_kl)
            d_entropy[t] = -w * a.entropy_coef
    return math.fsum(loss), d_logprob, d_entropy, terms


def on_a_kink(algorithm: AlgorithmSection, batch: TokenBatch) -> bool:
    """Whether a ratio lies so close to a limit that rounding decides on which side: there the derivative is a matter of taste."""
    a, off = algorithm, algorithm.off_policy
    c = a.clip_ratio_c or 1e300
    limits = [1 - a.clip_ratio_low or 1e-300, 1 + a.clip_ratio_high, c, math.exp(20), math.exp(-20)]
    weight_limits = [
        off.cap,
        off.mask_low or 1e-300,
        off.mask_high,
        off.geometric_low or 1e-300,
        off.geometric_high or 1e300,
    ]
    keep = batch.mask
    old = batch.behaviour_logprobs if off.mode == "bypass" else batch.old_logprobs
    for values, marks in (
        (batch.logprobs - old, limits),
        (batch.logprobs - batch.ref_logprobs, limits),
        (old - batch.behaviour_logprobs, weight_limits),
    ):
        for response in set(batch.sequence_ids.tolist()):
            x = values[keep & (batch.sequence_ids == response)]
            for y in [*x.tolist(), float(x.sum()), float(x.mean()) if len(x) else 0.0]:
                if any(abs(y - math.log(mark)) < 1e-9 for mark in marks):
                    return True
    d = batch.ref_logprobs - batch.logprobs
    return bool(((torch.expm1(d) - d - 10).abs()[keep] < 1e-6).any())


@settings(max_examples=250, deadline=None)
@given(algorithms(), batches())
def test_loss_and_gradients_equal_the_reference(algorithm: AlgorithmSection, batch: TokenBatch) -> None:
    assume(not on_a_kink(algorithm, batch))
    loss, d_logprob, d_entropy, _ = evaluate(algorithm, batch)
    want, want_d_logprob, want_d_entropy, terms = expected(algorithm, batch)
    assert loss == pytest.approx(want, rel=1e-9, abs=1e-11 * (1 + terms))
    np.testing.assert_allclose(d_logprob.numpy(), want_d_logprob, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(d_entropy.numpy(), want_d_entropy, rtol=1e-12, atol=0)
    masked = ~batch.mask
    assert (d_logprob[masked] == 0).all() and (d_entropy[masked] == 0).all()


@settings(max_examples=100, deadline=None)
@given(algorithms(), batches(), st.data())
def test_split_and_order_of_responses_do_not_matter(algorithm: AlgorithmSection, batch: TokenBatch, data) -> None:
    assume(not on_a_kink(algorithm, batch))
    responses = sorted(set(batch.sequence_ids.tolist()))
    order = data.draw(st.permutations(responses))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=4)))
    none = torch.zeros(0, dtype=torch.int64)
    split = [
        torch.cat([none, *[torch.nonzero(batch.sequence_ids == r).flatten() for r in order[a:b]]])
        for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)
    ]
    whole, parts = evaluate(algorithm, batch), evaluate(algorithm, batch, split)
    scale = 1 + expected(algorithm, batch)[3]
    assert parts[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-13 * scale)
    for a, b in zip(parts[1:3], whole[1:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert parts[3] == pytest.approx(whole[3], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo", "pg"])
@pytest.mark.parametrize("seed", range(4))
def test_float32_within_the_usual_range_is_right_to_a_millionth(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = torch.tensor(np.repeat(np.arange(20), rng.integers(1, 40, 20)))
    n = len(ids)
    old = torch.tensor(rng.uniform(-6, 0, n), dtype=torch.float32)
    near = [torch.tensor(rng.uniform(-0.9, 0.9, n), dtype=torch.float32) for _ in range(3)]
    batch = TokenBatch(
        logprobs=old + near[0],
        entropy=near[1].abs(),
        behaviour_logprobs=old + near[1],
        old_logprobs=old,
        ref_logprobs=old + near[2],
        advantages=torch.tensor(rng.normal(size=20), dtype=torch.float32)[ids],
        weights=torch.full((n,), 1 / n, dtype=torch.float64),
        mask=torch.tensor(rng.random(n) < 0.8),
        sequence_ids=ids,
    )
    algorithm = section(policy_loss=name, entropy_coef=0.1, kl={"coef": 0.1, "kind": "k2"})
    loss, d_logprob, d_entropy, _ = evaluate(algorithm, batch)
    want, want_d_logprob, want_d_entropy, terms = expected(algorithm, batch)
    assert abs(loss - want) < 1e-6 * terms
    # A gradient is the sum of two terms, which may cancel: relative to the larger one.
    np.testing.assert_allclose(d_logprob.numpy(), want_d_logprob, rtol=1e-6, atol=1e-6 / n)
    np.testing.assert_allclose(d_entropy.numpy(), want_d_entropy, rtol=1e-6)


def tiny(**changes) -> TokenBatch:
    """Two responses of two tokens, on-policy, of advantage 1 and -1."""
    x = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    batch = TokenBatch(
        logprobs=x,
        entropy=torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64),
        behaviour_logprobs=x,
        old_logprobs=x,
        ref_logprobs=x,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        weights=torch.full((4,), 0.25, dtype=torch.float64),
        mask=torch.ones(4, dtype=torch.bool),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
    )
    return replace(batch, **changes)


def section(**values) -> AlgorithmSection:
    return AlgorithmSection.model_validate(values)


@pytest.mark.parametrize("name", ["clip", "gspo"])
def test_on_policy_the_gradient_is_minus_the_weighted_advantage(name: str) -> None:
    loss, gradient, _, sums = evaluate(section(policy_loss=name), tiny())
    assert loss == 0.0 and gradient.tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert sums["ratio"] == sums["tokens"] == 4.0 and sums["pg_clipfrac"] == 0.0


def test_gspo_clips_whole_responses() -> None:
    batch = tiny()
    # Response 0: log-ratios 1 and -0.8, geometric mean e^0.1, within the range though both tokens are far outside.
    batch = replace(batch, logprobs=batch.logprobs + torch.tensor([1.0, -0.8, -0.9, 0.1]))
    _, gradient, _, sums = evaluate(section(policy_loss="gspo"), batch)
    s = math.exp(0.1)
    assert gradient.tolist() == pytest.approx([-0.25 * s, -0.25 * s, 0.0, 0.0])
    assert sums["pg_clipfrac"] == 2.0  # response 1: e^-0.4 is below 0.8 and its advantage is negative


def test_a_runaway_sequence_ratio_is_bounded_and_has_no_gradient() -> None:
    batch = tiny()
    batch = replace(batch, logprobs=batch.logprobs + 80.0)
    loss, gradient, _, sums = evaluate(section(policy_loss="gspo", clip_ratio_c=None), batch)
    assert loss == pytest.approx(0.5 * math.exp(20.0) - 0.5 * 1.28) and gradient.tolist() == [0.0] * 4
    assert sums["log_ratio_clamped"] == 4.0


def test_gspo_has_the_gradient_of_the_sequence_objective() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths, total = [3, 1, 5], 9
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    old = -2 * torch.rand(total, generator=generator, dtype=torch.float64)
    new = (old + 0.05 * torch.randn(total, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)
    s = torch.stack([(new - old)[ids == i].mean().exp() for i in range(3)])
    (want,) = torch.autograd.grad(-(s * advantages).mean(), new)
    weights = token_weights("seq-mean-token-mean", torch.tensor(lengths), torch.arange(3), 5)[ids]
    batch = TokenBatch(new.detach(), old * 0, old, old, old, advantages[ids], weights, ids >= 0, ids)
    _, gradient, _, _ = evaluate(section(policy_loss="gspo"), batch)
    torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-14)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    batch = tiny()
    batch = replace(batch, logprobs=batch.logprobs + torch.tensor([1.0, 0.0, 0.0, -1.0]))
    _, gradient, _, sums = evaluate(section(policy_loss="cispo"), batch)
    assert gradient.tolist() == pytest.approx([-0.25 * 1.28, -0.25, 0.25, 0.25 * 0.8])
    assert sums["pg_clipfrac"] == 2.0
    _, gradient, _, sums = evaluate(section(policy_loss="cispo", clip_ratio_low=1.0), batch)
    assert gradient[3].item() == pytest.approx(0.25 * math.exp(-1)) and sums["pg_clipfrac"] == 1.0


def test_each_bound_reports_its_fraction() -> None:
    batch = tiny()
    batch = replace(batch, behaviour_logprobs=batch.old_logprobs - torch.tensor([1.0, 0.0, 0.0, -3.0]))
    sums = evaluate(section(), batch)[3]
    assert (sums["is_capped"], sums["is_masked"], sums["seq_rejected"], sums["sequences"]) == (1.0, 0.0, 0.0, 2.0)
    assert sums["k1_kl"] == pytest.approx(-(1.0 - 3.0))
    masked = section(off_policy={"bound": "mask", "mask_low": 0.5, "mask_high": 2.0})
    loss, gradient, _, sums = evaluate(masked, batch)
    assert gradient.tolist() == [0.0, -0.25, 0.25, 0.0]  # the denominators still count four tokens
    assert (sums["is_capped"], sums["is_masked"], sums["tokens"]) == (0.0, 2.0, 4.0)
    rejecting = section(off_policy={"level": "off", "geometric_low": 0.5, "geometric_high": 2.0})
    _, gradient, _, sums = evaluate(rejecting, batch)
    assert gradient.tolist() == [-0.25, -0.25, 0.0, 0.0]  # e^0.5 is inside, e^-1.5 is not
    assert (sums["seq_rejected"], sums["seq_rejected_tokens"]) == (1.0, 2.0)


def test_kl_and_entropy_terms_have_the_aggregation_weights() -> None:
    batch = tiny(ref_logprobs=tiny().logprobs - 0.5, weights=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    plain = evaluate(section(), batch)
    kl = evaluate(section(kl={"coef": 2.0, "kind": "k1"}), batch)
    assert kl[0] - plain[0] == pytest.approx(2.0 * 0.5)
    assert (kl[1] - plain[1]).tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert kl[3]["kl_part"] == pytest.approx(0.5) and kl[3]["ref_kl"] == pytest.approx(2.0)
    bonus = evaluate(section(entropy_coef=0.5), batch)
    assert plain[0] - bonus[0] == pytest.approx(0.5 * (0.05 + 0.2 + 0.45 + 0.8))
    assert bonus[2].tolist() == pytest.approx([-0.05, -0.1, -0.15, -0.2])


def test_a_kl_estimate_beyond_its_limit_is_counted_and_has_no_gradient() -> None:
    batch = tiny(ref_logprobs=tiny().logprobs + torch.tensor([5.0, 0.0, 60.0, 0.0]), advantages=torch.zeros(4).double())
    _, gradient, _, sums = evaluate(section(kl={"coef": 1.0, "kind": "low_var_kl"}), batch)
    assert sums["ref_kl_clamped"] == 2.0 and gradient.tolist() == [0.0] * 4
    _, gradient, _, sums = evaluate(section(kl={"coef": 1.0, "kind": "k3"}), batch)
    assert sums["ref_kl_clamped"] == 1.0 and gradient.tolist() == pytest.approx([-0.25 * math.expm1(5), 0, 0, 0])


def test_missing_log_probs_are_named() -> None:
    with pytest.raises(ValueError, match="decoupled needs old_logprobs"):
        evaluate_without("old_logprobs", section())
    with pytest.raises(ValueError, match=r"kl.coef=0.1 needs ref_logprobs"):
        evaluate_without("ref_logprobs", section(kl={"coef": 0.1}))


def evaluate_without(name: str, algorithm: AlgorithmSection) -> None:
    Objective(algorithm)(replace(tiny(), **{name: None}))


def half_pg(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, clip_c, is_weights=None, sequence_ids=None):
    """A third-party loss with a metric of its own."""
    loss = torch.where(mask, -0.5 * advantages * torch.where(mask, logprobs, 0.0), 0.0)
    return PolicyLossOutput(loss, {"halves": mask.sum().double()})


def test_a_third_party_loss_is_reached_by_import_path_and_gets_the_standard_metrics() -> None:
    batch = replace(tiny(), logprobs=tiny().logprobs + 0.1)
    _, gradient, _, sums = evaluate(section(policy_loss=f"{__name__}:half_pg"), batch)
    assert gradient.tolist() == [-0.125, -0.125, 0.125, 0.125]
    assert sums["policy_loss/halves"] == sums["tokens"] == 4.0
    assert sums["ppo_kl"] == pytest.approx(-0.4) and sums["ratio"] == pytest.approx(4 * math.exp(0.1))
