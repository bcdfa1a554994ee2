"""Options that act between the ticket and the loss, and the metrics of a step that come of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dapo_megatron.actor.actor import UpdateResult
from dapo_megatron.actor.optimizer import StepResult
from dapo_megatron.algorithm import Objective, PolicyLossOutput, TokenBatch
from dapo_megatron.observability.metrics import is_declared
from dapo_megatron.step_batch import StepBatch, assemble
from dapo_megatron.step_metrics import _update_metrics
from rollout_service.sample import Ticket
from tests.integration.actor_ranks import Layout, make_config, make_groups, make_ticket

GROUPS = make_groups(vocab=50, groups=3, group_size=4, seed=5)


def config_with(**algorithm):
    return make_config("unused", Layout(), 1, groups=3, group_size=4, algorithm=algorithm)


def ticket_with(truncated: list[int]) -> Ticket:
    ticket = make_ticket(GROUPS)
    flags = np.zeros((3, 4), bool)
    flags.flat[truncated] = True
    metas = [dataclasses.replace(meta, truncated=flags[i]) for i, meta in enumerate(ticket.groups)]
    return dataclasses.replace(ticket, groups=metas)


def assembled(truncated: list[int], **algorithm) -> StepBatch:
    return assemble(
        ticket_with(truncated),
        lambda refs: [GROUPS[r]["packed"] for r in refs],
        config_with(**algorithm),
        dp_rank=0,
        dp_size=1,
    )


def per_sample(batch: StepBatch, name: str) -> dict[int, set[float]]:
    """The values that the tokens of each sample have."""
    values: dict[int, set[float]] = {}
    for mini in batch.mini_batches:
        for micro in mini:
            for position, sample in enumerate(micro.samples):
                values[sample] = set(getattr(micro, name)[micro.packed.sample_index == position].tolist())
    return values


def test_overlong_filtering_masks_truncated_samples_and_counts_only_the_others() -> None:
    batch = assembled([1, 7], overlong_filtering=True)
    lengths = np.concatenate([np.diff(g["packed"]["offsets"]) for g in GROUPS])
    trained = lengths.sum() - lengths[1] - lengths[7]
    masks, weights = per_sample(batch, "mask"), per_sample(batch, "weights")
    for sample in range(12):
        out = sample in (1, 7)
        assert masks[sample] == {not out}
        assert weights[sample] == {0.0 if out else 1 / float(trained)}
    assert batch.filtered_share == pytest.approx(2 / 12)
    # They still stand in their group's statistics.
    assert torch.equal(batch.advantages, assembled([]).advantages)


def test_without_the_option_truncated_samples_are_trained() -> None:
    batch = assembled([1, 7])
    assert set().union(*per_sample(batch, "mask").values()) == {True}
    assert batch.filtered_share == 0.0
    assert per_sample(batch, "weights") == per_sample(assembled([]), "weights")


def test_the_estimator_is_the_one_that_is_named() -> None:
    rewards = torch.tensor(np.array([g["rewards"] for g in GROUPS]), dtype=torch.float64)
    want = (rewards - rewards.mean(1, keepdim=True)) * 4 / 3
    torch.testing.assert_close(
        assembled([], adv_estimator="rloo").advantages.double().view(3, 4), want, atol=1e-6, rtol=0
    )


def counting_loss(logprobs, old_logprobs, advantages, mask, **rest) -> PolicyLossOutput:
    loss = torch.where(mask, -advantages * torch.where(mask, logprobs, 0.0), 0.0)
    return PolicyLossOutput(loss, {"threes": 3.0 * mask.sum().double(), "peak_max": torch.tensor(7.0)})


def update_metrics(truncated: list[int], **algorithm) -> dict[str, float]:
    """Metrics of one update whose policy differs from the old one by 0.1 nats a token and from the reference by 0.2."""
    section = config_with(**algorithm).algorithm
    (micro_batches,) = assembled(truncated, **algorithm).mini_batches
    sums: dict[str, float] = {}
    for micro in micro_batches:
        x = micro.behaviour_logprobs.clone().requires_grad_()
        _, metrics = Objective(section)(
            TokenBatch(
                logprobs=x + 0.1,
                entropy=torch.full_like(x, 2.0),
                behaviour_logprobs=micro.behaviour_logprobs,
                old_logprobs=x.detach(),
                ref_logprobs=x.detach() - 0.1,
                advantages=micro.advantages,
                weights=micro.weights,
                mask=micro.mask,
                sequence_ids=micro.packed.sample_index,
            )
        )
        for key, value in metrics.items():
            old = sums.get(key, 0.0)
            sums[key] = max(old, float(value)) if key.endswith("_max") else old + float(value)
    metrics = _update_metrics([UpdateResult(StepResult(True, 1.0, 1e-6), sums)], section)
    assert all(is_declared(name) for name in metrics)
    return metrics


def test_every_part_of_the_loss_is_logged() -> None:
    metrics = update_metrics([1], overlong_filtering=True, entropy_coef=0.5, kl={"coef": 2.0, "kind": "k1"})
    assert metrics["actor/kl_loss"] == pytest.approx(0.2, rel=1e-5) == metrics["actor/ref_kl"]
    assert metrics["actor/loss"] == pytest.approx(metrics["actor/pg_loss"] + 2.0 * 0.2 - 0.5 * 2.0, rel=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(2.0)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.1, rel=1e-5)
    assert metrics["rollout_corr/is_eff_sample_size"] == 1.0 and metrics["rollout_corr/k1_kl"] == 0.0
    assert "actor/kl_loss" not in update_metrics([])


def test_what_a_third_party_loss_reports_is_logged_under_its_own_names() -> None:
    metrics = update_metrics([], policy_loss=f"{__name__}:counting_loss")
    assert metrics["actor/policy_loss/threes"] == pytest.approx(3.0)
    assert metrics["actor/policy_loss/peak_max"] == 7.0


def test_a_step_without_a_trained_token_has_loss_zero() -> None:
    metrics = update_metrics(list(range(12)), overlong_filtering=True)
    assert metrics["actor/loss"] == metrics["actor/entropy"] == metrics["rollout_corr/is_eff_sample_size"] == 0.0
