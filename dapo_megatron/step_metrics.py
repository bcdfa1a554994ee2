"""Metrics of one step, and the summary of a run, from sums that the ranks have already added up."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from checkpoint_convert.architecture import ModelArchitecture
from dapo_megatron.actor.actor import UpdateResult
from dapo_megatron.algorithm.objective import EXTRA_PREFIX
from dapo_megatron.config.algorithm_section import AlgorithmSection
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.observability.flops import UPDATE_PASSES, TokenCounts, forward_flops
from dapo_megatron.resharder.probe import ProbeResult
from dapo_megatron.resharder.transport import SyncReport
from dapo_megatron.step_batch import StepBatch
from rollout_service.sample import Ticket


def step_metrics(
    ticket: Ticket,
    batch: StepBatch,
    updates: list[UpdateResult],
    sync: SyncReport,
    probe: ProbeResult | None,
    seconds: dict[str, float],
    config: RunConfig,
    *,
    trainer_version: int,
) -> dict[str, float]:
    """All metrics of one step by name; see `observability.metrics` for units and meanings."""
    metrics = _update_metrics(updates, config.algorithm) | _data_metrics(ticket, config, trainer_version)
    metrics["actor/overlong_filtered"] = batch.filtered_share
    advantages = batch.advantages.double()
    metrics |= {"critic/advantages/mean": float(advantages.mean()), "critic/advantages/std": float(advantages.std())}
    metrics |= {f"timing_s/{phase}": value for phase, value in seconds.items()}
    metrics |= {f"timing_s/update_weights/{phase}": value for phase, value in sync.seconds.items()}
    step_s = seconds["step"]
    metrics |= {
        "perf/total_num_tokens": float(batch.total_tokens),
        "perf/response_tokens": float(batch.response_tokens),
        "perf/time_per_step": step_s,
        "perf/throughput": batch.total_tokens / step_s,
        "perf/tokens_per_gpu_per_sec": batch.total_tokens / step_s / config.parallel.world_size,
        "perf/update_weights_bytes": float(sync.bytes),
        "perf/update_weights_planned_bytes": float(sync.planned_bytes),
        "perf/update_weights_gb_per_s": sync.gb_per_s,
        "perf/update_weights_engines_lost": float(len(sync.lost)),
        "fully_async/trainer/idle_ratio": seconds["wait"] / step_s,
    }
    if sync.density is not None:
        metrics["perf/update_weights_density"] = sync.density
    if probe is not None:
        metrics |= {
            "rollout_corr/logprob_abs_diff": probe.max_abs_diff,
            "rollout_corr/logprob_abs_diff_mean": probe.mean_abs_diff,
            "rollout_corr/probed_engines": float(probe.engines),
        }
    return metrics | ticket.stats


def flop_metrics(
    ticket: Ticket, seconds: dict[str, float], config: RunConfig, arch: ModelArchitecture, peak_flops: float | None
) -> dict[str, float]:
    """Achieved model FLOP/s of the updates and of the log-prob pass, and their share of the devices' peak.

    Args:
        seconds: wall time by phase, with `update_actor` and `old_log_prob`.
        peak_flops: FLOP/s of one device; None where no number is known, then there is no MFU.
    """
    counts = TokenCounts.of(
        [g.prompt_length for g in ticket.groups for _ in g.response_lengths],
        [n for g in ticket.groups for n in g.response_lengths],
    )
    forward = forward_flops(arch, counts).total / config.parallel.world_size
    per_device = {"actor": UPDATE_PASSES * forward / seconds["update_actor"]}
    if config.algorithm.off_policy.mode != "bypass":
        per_device["actor_infer"] = forward / seconds["old_log_prob"]
    metrics = {f"perf/tflops_per_gpu/{phase}": flops / 1e12 for phase, flops in per_device.items()}
    if peak_flops is not None:
        metrics |= {f"perf/mfu/{phase}": flops / peak_flops for phase, flops in per_device.items()}
    return metrics


def _update_metrics(updates: list[UpdateResult], algorithm: AlgorithmSection) -> dict[str, float]:
    def total(key: str) -> float:
        return sum(u.metrics[key] for u in updates)

    def largest(key: str) -> float:
        return max(u.metrics[key] for u in updates)

    # Overlong filtering may leave a mini-batch, or a whole step, without a trained token.
    tokens = max(total("tokens"), 1.0)
    is_weight, is_weight_sq = total("is_weight"), total("is_weight_sq")
    first = updates[0].metrics
    applied = [u for u in updates if u.step.applied]
    metrics = {
        "actor/loss": total("loss") / len(updates),
        "actor/pg_loss": total("policy_part") / len(updates),
        "actor/pg_clipfrac": total("pg_clipfrac") / tokens,
        "actor/pg_clipfrac_lower": total("pg_clipfrac_lower") / tokens,
        "actor/ppo_kl": total("ppo_kl") / tokens,
        "actor/ppo_kl_first_minibatch": first["ppo_kl"] / max(first["tokens"], 1.0),
        "actor/ratio_mean": total("ratio") / tokens,
        "actor/log_ratio_clamped": total("log_ratio_clamped") / tokens,
        "actor/entropy": total("entropy") / tokens,
        "actor/grad_norm": statistics.fmean(u.step.grad_norm for u in updates),
        "actor/lr": updates[-1].step.lr,
        "actor/updates_skipped": float(len(updates) - len(applied)),
        "rollout_corr/behaviour_abs_diff": total("logprob_abs_diff") / tokens,
        "rollout_corr/behaviour_abs_diff_max": largest("logprob_abs_diff_max"),
        "rollout_corr/k1_kl": total("k1_kl") / tokens,
        "rollout_corr/k3_kl": total("k3_kl") / tokens,
        "rollout_corr/is_weight_mean": is_weight / tokens,
        "rollout_corr/is_capped_fraction": total("is_capped") / tokens,
        "rollout_corr/is_masked_fraction": total("is_masked") / tokens,
        "rollout_corr/seq_rejected_fraction": total("seq_rejected") / max(total("sequences"), 1.0),
        "rollout_corr/seq_rejected_token_fraction": total("seq_rejected_tokens") / tokens,
        "rollout_corr/is_eff_sample_size": is_weight**2 / (tokens * is_weight_sq) if is_weight_sq else 0.0,
    }
    if algorithm.kl.coef > 0:
        metrics |= {
            "actor/kl_loss": total("kl_part") / len(updates),
            "actor/ref_kl": total("ref_kl") / tokens,
            "actor/ref_kl_clamped": total("ref_kl_clamped") / tokens,
        }
    for key in first:
        if key.startswith(EXTRA_PREFIX):
            metrics[f"actor/{key}"] = largest(key) if key.endswith("_max") else total(key) / tokens
    return metrics


def _data_metrics(ticket: Ticket, config: RunConfig, trainer_version: int) -> dict[str, float]:
    groups = ticket.groups
    lengths = np.concatenate([g.response_lengths for g in groups])
    rewards = np.concatenate([g.rewards for g in groups])
    acc = np.concatenate([g.acc for g in groups])
    names = dict.fromkeys(name for g in groups for name in g.reward_parts)
    parts = {name: np.concatenate([g.reward_parts[name] for g in groups if name in g.reward_parts]) for name in names}
    staleness = np.array([trainer_version - g.oldest_version for g in groups])
    return {
        "critic/score/mean": float(acc.mean()),
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        **{f"critic/rewards/{name}/mean": float(values.mean()) for name, values in parts.items()},
        "critic/overlong_share": float((parts["overlong_penalty"] < 0).mean()) if "overlong_penalty" in parts else 0.0,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(np.concatenate([g.truncated for g in groups]).mean()),
        "prompt_length/mean": float(np.mean([g.prompt_length for g in groups])),
        "prompt_length/max": float(max(g.prompt_length for g in groups)),
        "training/off_policy/staleness/mean": float(staleness.mean()),
        "training/off_policy/staleness/max": float(staleness.max()),
        "training/epoch": float(max(g.epoch for g in groups)),
    }


def summarise(
    history: list[dict[str, float]],
    before: dict[str, Any],
    after: dict[str, Any],
    *,
    phases_s: dict[str, float],
    loop_s: float,
    service_totals: dict[str, float],
    wall_time_s: float,
) -> dict[str, Any]:
    """The content of `summary.json`; accuracies are of the first evaluation set, None where it was not evaluated."""

    def accuracy(results: dict[str, Any], mode: str) -> float | None:
        first = next(iter(results.values()), {})
        return first[mode]["acc"] if first.get(mode) else None

    def column(name: str) -> list[float]:
        return [m[name] for m in history if name in m]

    diffs = column("rollout_corr/logprob_abs_diff")
    return {
        "accuracy_before_sampled": accuracy(before, "sampled"),
        "accuracy_before_greedy": accuracy(before, "greedy"),
        "accuracy_after_sampled": accuracy(after, "sampled"),
        "accuracy_after_greedy": accuracy(after, "greedy"),
        "steps": len(history),
        "wall_time_s": wall_time_s,
        "tokens_per_s": sum(column("perf/total_num_tokens")) / loop_s if loop_s else 0.0,
        "staleness_mean": statistics.fmean(column("training/off_policy/staleness/mean")),
        "staleness_max": max(column("training/off_policy/staleness/max")),
        "weight_sync_s_median": statistics.median(column("timing_s/update_weights")),
        "logprob_abs_diff_max": max(diffs) if diffs else None,
        "ppo_kl_first_minibatch_max": max(abs(v) for v in column("actor/ppo_kl_first_minibatch")),
        "phases_s": phases_s,
        "train_loop_s": loop_s,
        "service": service_totals,
    }
