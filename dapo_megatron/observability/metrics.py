"""The registry of metric names: name, unit, meaning. docs/metrics.md is generated from it.

A name that is not declared here is refused by `MetricsLogger.log`, so that dashboards never meet a name that nobody
explained. Names follow what users of other trainers know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One declared name.

    Attributes:
        name: exact name, or for a family a name with `<placeholder>` parts.
        unit: `nats`, `tokens`, `s`, `share` (0 to 1), `count`, ...
        meaning: one sentence.
    """

    name: str
    unit: str
    meaning: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression of the family; a placeholder stands for one or more characters other than `/`."""
        parts = re.split(r"<[a-z_]+>", self.name)
        return re.compile("[^/]+".join(re.escape(part) for part in parts))


METRICS: tuple[Metric, ...] = (
    # The update
    Metric("actor/loss", "1", "whole loss with KL and entropy terms, mean over the step's mini-batches"),
    Metric("actor/pg_loss", "1", "policy loss, mean over the step's mini-batches"),
    Metric("actor/pg_clipfrac", "share", "response tokens whose loss took the clipped ratio"),
    Metric("actor/pg_clipfrac_lower", "share", "response tokens with negative advantage stopped by the dual clip"),
    Metric("actor/ppo_kl", "nats", "mean of old minus new log-prob over the step's response tokens"),
    Metric(
        "actor/ppo_kl_first_minibatch",
        "nats",
        "the same over the first mini-batch: 0 when old log-probs are recomputed",
    ),
    Metric(
        "actor/ratio_mean", "1", "mean ratio of new to old probability over the response tokens (gspo: of responses)"
    ),
    Metric("actor/log_ratio_clamped", "share", "response tokens whose log-ratio was beyond +-20 and was cut there"),
    Metric("actor/overlong_filtered", "share", "samples that overlong filtering took out of the loss"),
    Metric("actor/kl_loss", "nats", "KL term before its coefficient, mean over the step's mini-batches"),
    Metric("actor/ref_kl", "nats", "mean KL estimate against the reference policy over the response tokens"),
    Metric("actor/ref_kl_clamped", "share", "response tokens whose KL estimate met a limit"),
    Metric("actor/entropy", "nats", "mean entropy of the trainer's policy at the response tokens"),
    Metric("actor/grad_norm", "1", "global gradient norm before clipping, mean over the step's updates"),
    Metric("actor/lr", "1", "learning rate of the step's last update"),
    Metric("actor/updates_skipped", "count", "updates skipped in the step because loss or gradient was not finite"),
    # Scores and lengths of the batch
    Metric("critic/score/mean", "1", "mean raw score (accuracy for rule rewards)"),
    Metric("critic/rewards/mean", "1", "mean shaped reward, overlong punishment included"),
    Metric("critic/rewards/max", "1", "largest shaped reward"),
    Metric("critic/rewards/min", "1", "smallest shaped reward"),
    Metric("critic/overlong_share", "share", "samples with a soft overlong punishment"),
    Metric("critic/advantages/mean", "1", "mean advantage over samples"),
    Metric("critic/advantages/std", "1", "standard deviation of the advantages over samples"),
    Metric("response_length/mean", "tokens", "mean response length"),
    Metric("response_length/max", "tokens", "longest response"),
    Metric("response_length/min", "tokens", "shortest response"),
    Metric("response_length/clip_ratio", "share", "responses that ended at the length limit"),
    Metric("prompt_length/mean", "tokens", "mean prompt length, template included"),
    Metric("prompt_length/max", "tokens", "longest prompt"),
    # Progress and freshness
    Metric("training/epoch", "count", "highest epoch among the batch's prompts, from 0"),
    Metric(
        "training/off_policy/staleness/mean",
        "versions",
        "mean age of the batch's groups: version trained minus oldest version sampled",
    ),
    Metric("training/off_policy/staleness/max", "versions", "largest age in the batch"),
    # Dynamic sampling; the counts of outcomes are a family
    Metric(
        "training/filter_groups/acc",
        "share",
        "mean raw score of all groups finished since the last step, dropped ones included: the model's accuracy on the training prompts",
    ),
    Metric(
        "training/filter_groups/filtered_share",
        "share",
        "uninformative groups among the last `rollout.filter_groups.window_groups`",
    ),
    Metric("training/curriculum/resting", "count", "prompts that rest because they were solved completely"),
    Metric("training/curriculum/skipped", "count", "prompts passed over since the last step because they rest"),
    Metric(
        "training/oversampling/keep_rate",
        "share",
        "kept groups among the last `rollout.filter_groups.window_groups`, by which admission runs ahead",
    ),
    Metric(
        "training/oversampling/discarded",
        "count",
        "kept groups given up since the last step, because the staleness bound leaves no batch for them; their prompts come again",
    ),
    Metric("training/oversampling/aborted", "count", "the same, while they were still generated or scored"),
    # Agreement of trainer and engines
    Metric(
        "rollout_corr/logprob_abs_diff",
        "nats",
        "largest |trainer - engine| log-prob of the probe sequences after the weight update",
    ),
    Metric("rollout_corr/logprob_abs_diff_mean", "nats", "mean such difference"),
    Metric(
        "rollout_corr/probed_engines",
        "engines",
        "engines that the comparison covers: all that were up with the new weights",
    ),
    Metric(
        "rollout_corr/behaviour_abs_diff",
        "nats",
        "mean |old - behaviour| log-prob over the batch: staleness and arithmetic together",
    ),
    Metric("rollout_corr/behaviour_abs_diff_max", "nats", "largest such difference"),
    Metric("rollout_corr/k1_kl", "nats", "k1 estimate of KL(behaviour || old): mean of behaviour minus old"),
    Metric("rollout_corr/k3_kl", "nats", "k3 estimate of KL(behaviour || old)"),
    Metric("rollout_corr/is_weight_mean", "1", "mean importance weight after truncation, masking and rejection"),
    Metric("rollout_corr/is_capped_fraction", "share", "importance weights that were truncated"),
    Metric("rollout_corr/is_masked_fraction", "share", "response tokens whose importance weight was outside the band"),
    Metric(
        "rollout_corr/seq_rejected_fraction", "share", "responses rejected for the geometric mean of their token ratios"
    ),
    Metric("rollout_corr/seq_rejected_token_fraction", "share", "response tokens in rejected responses"),
    Metric(
        "rollout_corr/is_eff_sample_size", "share", "effective sample size of the importance weights over their number"
    ),
    # Speed
    Metric("perf/throughput", "tokens/s", "tokens of the batch, prompts included, per second of the step"),
    Metric("perf/tokens_per_gpu_per_sec", "tokens/s", "the same per trainer process"),
    Metric("perf/total_num_tokens", "tokens", "tokens of the batch, prompts included"),
    Metric("perf/response_tokens", "tokens", "response tokens of the batch"),
    Metric("perf/time_per_step", "s", "wall time of the step"),
    Metric(
        "perf/mfu/actor",
        "share",
        "model FLOPs of the updates (3 x forward, causal attention, nothing recomputed) over what the devices could do in `timing_s/update_actor`; absent where the device's peak is not known, as on a CPU",
    ),
    Metric(
        "perf/mfu/actor_infer", "share", "the same of the old log-prob pass (1 x forward) in `timing_s/old_log_prob`"
    ),
    Metric("perf/tflops_per_gpu/actor", "TFLOP/s", "model FLOPs of the updates per second and trainer process"),
    Metric("perf/tflops_per_gpu/actor_infer", "TFLOP/s", "the same of the old log-prob pass"),
    Metric("perf/update_weights_bytes", "bytes", "bytes that left the trainer for the engines, once for all of them"),
    Metric("perf/update_weights_planned_bytes", "bytes", "bytes that each engine needs; less than sent after a repeat"),
    Metric("perf/update_weights_gb_per_s", "GB/s", "10^9 bytes sent per second of the update's phase send"),
    Metric(
        "perf/update_weights_density",
        "share",
        "numbers of the weights, as the engines hold them, that changed since the version of before; with transport delta",
    ),
    Metric("perf/update_weights_engines_lost", "count", "engines left out of the update because they failed in it"),
    Metric("fully_async/trainer/idle_ratio", "share", "share of the step in which the trainer waited for a batch"),
    Metric(
        "fully_async/rollouter/idle_ratio",
        "share",
        "share of the step in which the engines had nothing to do or were paused",
    ),
)

FAMILIES: tuple[Metric, ...] = (
    Metric(
        "actor/policy_loss/<measure>",
        "various",
        "what a third-party policy loss reports, mean over response tokens (`*_max`: maximum)",
    ),
    Metric(
        "timing_s/<phase>",
        "s",
        "wall time of a phase: wait, old_log_prob, ref_log_prob, update_actor, update_weights, probe, evaluate, save, step",
    ),
    Metric(
        "timing_s/update_weights/<phase>",
        "s",
        "wall time of a part of the weight update: plan (once), pause, connect, begin, gather and encode (beside send), send, end, check, resume; "
        "engine_stall, from pause to resume, is the time in which no engine generates",
    ),
    Metric(
        "training/filter_groups/<outcome>",
        "count",
        "groups since the last step by outcome: kept, solve_all, solve_none, constant; accepted counts uninformative ones that `policy: accept` let through",
    ),
    Metric(
        "critic/rewards/<part>/mean",
        "1",
        "mean of one part of the shaped reward: acc_reward, overlong_penalty, or the weighted score of an extra rule",
    ),
    Metric("val-core/<set>/acc/mean@<k>", "share", "accuracy on a held-out set, mean over k samples (greedy: k = 1)"),
    Metric("val-core/<set>/acc/best@<k>", "share", "problems with at least one right answer among k samples"),
    Metric("val-core/<set>/acc/maj@<k>", "share", "problems whose most frequent answer among k samples is right"),
    Metric("val-core/<set>/<decoding>/acc/mean@<k>", "share", "the same, by decoding: greedy or sampled"),
    Metric("val-core/<set>/<decoding>/acc/best@<k>", "share", "the same, by decoding: greedy or sampled"),
    Metric("val-core/<set>/<decoding>/acc/maj@<k>", "share", "the same, by decoding: greedy or sampled"),
    Metric(
        "val-aux/<set>/<measure>", "various", "side measures of an evaluation: rows, response length, truncated share"
    ),
    Metric("val-aux/<set>/<decoding>/<measure>", "various", "the same, by decoding"),
    Metric(
        "rollout/<measure>",
        "various",
        "state of the rollout service: slots running, finished, in training, free, extra (over-sampling); engines alive, restarts, requests repeated",
    ),
    Metric("rollout/<part>/<measure>", "various", "the same for one part: queue, engine, data"),
    Metric(
        "reward/<measure>",
        "various",
        "reward rules since the last step: samples scored, faults by class (timeout, crash, error, http), workers respawned and recycled, batches sent, seconds",
    ),
)

_EXACT = frozenset(metric.name for metric in METRICS)


def is_declared(name: str) -> bool:
    """Whether a name may be logged."""
    return name in _EXACT or any(family.pattern.fullmatch(name) for family in FAMILIES)


def require_declared(name: str) -> None:
    """Refuse an undeclared name.

    Raises:
        KeyError: naming it.
    """
    if not is_declared(name):
        raise KeyError(f"metric {name!r} is not declared: add it to dapo_megatron/observability/metrics.py")
