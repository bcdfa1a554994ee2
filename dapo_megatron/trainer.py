"""The step loop: next batch, old log-probs, mini-batch updates, publish, check, log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from torch import Tensor

from dapo_megatron.actor.actor import Actor, LossBatch, UpdateResult
from dapo_megatron.batching import CostModel
from dapo_megatron.config.routing import routing_shape
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.observability.flops import TokenCounts, forward_flops
from dapo_megatron.observability.run_log import RunLog
from dapo_megatron.platform import current_platform
from dapo_megatron.resharder.probe import ProbeResult, probe_engines
from dapo_megatron.resharder.resharder import Resharder
from dapo_megatron.service_client import ServiceClient
from dapo_megatron.step_batch import StepBatch, assemble
from dapo_megatron.step_metrics import flop_metrics, step_metrics, summarise
from rollout_service.sample import Ticket


class TrainingStopped(RuntimeError):
    """The run must not go on; the message names step and cause. Nothing already written is lost."""


class Trainer:
    """One rank of the trainer. All ranks run the same methods in the same order; only rank 0 writes logs.

    Weight version v is what the engines hold after step v; version 0 is the starting checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        actor: Actor,
        service: ServiceClient,
        resharder: Resharder,
        log: RunLog,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.actor = actor
        self.service = service
        self.resharder = resharder
        self.log = log
        self._skipped_in_a_row = 0
        self._phases: dict[str, float] = {}
        self._history: list[dict[str, float]] = []
        self._cost_model = CostModel.from_flops(
            per_token=forward_flops(actor.arch, TokenCounts(tokens=1, scored=1, score_pairs=0)).total,
            per_score_pair=forward_flops(actor.arch, TokenCounts(tokens=0, scored=0, score_pairs=1)).total,
        )
        self._peak_flops = current_platform().peak_flops(next(actor.chunks[0].parameters()).dtype)

    def run(self) -> None:
        """Train from the starting weights to the last step, evaluate before and after, export."""
        started = time.perf_counter()
        with self._phase("wait_for_engines"):
            engine, ray = self.config.rollout.engine, self.config.ray
            self.service.wait_started(engine.startup_timeout_s + ray.start_timeout_s)
        before = self._evaluate("evaluate_before", version=0) if self.config.evaluation.before_training else {}
        loop_started = time.perf_counter()
        for step in range(1, self.config.trainer.total_steps + 1):
            self.train_step(step)
        loop_seconds = time.perf_counter() - loop_started

        version = self.config.trainer.total_steps
        exported = self.run_dir / "checkpoint_hf"
        self.log.event("export", path=str(exported))
        with self._phase("export"):
            self.resharder.export(exported)
        after: dict[str, Any] = {}
        if self.config.evaluation.after_training and self.config.evaluation.sets:
            # The file that a user takes away is what is evaluated: the engines load it from disk.
            with self._phase("reload_export"):
                self.service.load_from_disk(exported, version, self.config.weight_sync.timeout_s)
            after = self._evaluate("evaluate_after", version=version)
        service_totals = self.service.metrics(timeout_s=60.0)
        if self.log.active:
            summary = summarise(
                self._history,
                before,
                after,
                phases_s=self._phases,
                loop_s=loop_seconds,
                service_totals=service_totals,
                wall_time_s=time.perf_counter() - started,
            )
            self.log.summary(summary | {"checkpoint_hf": str(exported)})

    def train_step(self, step: int) -> None:
        """Consume the batch of `step`, update the actor on it, and publish version `step`."""
        seconds: dict[str, float] = {}
        started = time.perf_counter()
        with _timed(seconds, "wait"):
            ticket = self._next_ticket(step)
        with _timed(seconds, "assemble"):
            layout = self.actor.layout
            batch = assemble(
                ticket,
                self.service.fetch,
                self.config,
                dp_rank=layout.dp_rank,
                dp_size=layout.dp_size,
                cost_model=self._cost_model,
                routing=routing_shape(self.actor.arch) if self.config.rollout.router_replay else None,
            )
        with _timed(seconds, "old_log_prob"):
            old = self._old_logprobs(batch)
        ref: Iterator[Tensor | None] = repeat(None)
        if self.config.algorithm.kl.coef > 0:
            with _timed(seconds, "ref_log_prob"):
                # Stages before the last get no log-probs and need none.
                ref = chain(self.actor.reference_logprobs(batch.packed), repeat(None))
        mini_batches = [
            [micro.with_old_logprobs(next(old), next(ref)) for micro in mini] for mini in batch.mini_batches
        ]
        with _timed(seconds, "update_actor"):
            updates = [self._update(step, ticket, mini_batch) for mini_batch in mini_batches]
            self.actor.gather_parameters()
        with _timed(seconds, "update_weights"):
            sync = self.resharder.publish(version=step, step=step)
        with _timed(seconds, "probe"):
            probe = self._probe(step, ticket)
        seconds["step"] = time.perf_counter() - started
        for phase, value in seconds.items():
            if phase != "step":
                self._phases[phase] = self._phases.get(phase, 0.0) + value
        if self.log.active:
            metrics = step_metrics(ticket, batch, updates, sync, probe, seconds, self.config, trainer_version=step - 1)
            metrics |= flop_metrics(ticket, seconds, self.config, self.actor.arch, self._peak_flops)
            self._history.append(metrics)
            self.log.step(step, metrics)
            self.log.samples(step, ticket, self.service.fetch)

    def _next_ticket(self, step: int) -> Ticket:
        timeout_s = self.config.rollout.batch_timeout_s

        # The service raises with the state of its queue when the batch is late; the margin lets that message arrive.
        def warn(message: str) -> None:
            self.log.event("warning", message=f"step {step}: {message}")

        while not self.service.next_batch(step, timeout_s + 30.0, warn):
            self.log.event(
                "warning", message=f"step {step}: engines were restarted, publishing version {step - 1} again"
            )
            self.resharder.publish(version=step - 1, step=None)
        return self.service.ticket(step, timeout_s=60.0)

    def _old_logprobs(self, batch: StepBatch) -> Iterator[Tensor | None]:
        """Log-probs under the weights before this step's updates, on the same micro-batches that the updates use."""
        if self.config.algorithm.off_policy.mode == "bypass":
            return repeat(None)
        return chain((logprobs for logprobs, _ in self.actor.logprobs(batch.packed)), repeat(None))

    def _update(self, step: int, ticket: Ticket, mini_batch: list[LossBatch]) -> UpdateResult:
        result = self.actor.update(mini_batch)
        if result.step.applied and math.isfinite(result.metrics["loss"]):
            self._skipped_in_a_row = 0
            return result
        self._skipped_in_a_row += 1
        self.log.event("update_skipped", step=step, grad_norm=result.step.grad_norm, loss=result.metrics["loss"])
        if self._skipped_in_a_row >= self.config.trainer.max_nonfinite_updates:
            raise TrainingStopped(
                f"step {step}: {self._skipped_in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(gradient norm {result.step.grad_norm}); prompts: {', '.join(g.prompt_id for g in ticket.groups[:8])}"
            )
        return result

    def _probe(self, step: int, ticket: Ticket) -> ProbeResult | None:
        count = min(
            self.config.weight_sync.probe_samples, len(ticket.groups) * self.config.rollout.n_samples_per_prompt
        )
        if count == 0:
            return None
        # One sample of each of the first groups, more of them when there are fewer groups than probes.
        picks = [(i % len(ticket.groups), i // len(ticket.groups)) for i in range(count)]
        groups = dict(zip(range(count), self.service.fetch([ticket.refs[g] for g, _ in picks]), strict=True))
        sequences = []
        for i, (_, sample) in enumerate(picks):
            start, end = groups[i]["offsets"][sample : sample + 2]
            sequences.append((groups[i]["prompt_ids"], groups[i]["response_ids"][start:end]))
        result = probe_engines(self.actor, self.service, sequences, timeout_s=self.config.weight_sync.timeout_s)
        tolerance = self.config.weight_sync.probe_tolerance
        if tolerance is not None and result.max_abs_diff > tolerance:
            raise TrainingStopped(
                f"step {step}: after the weight update engine {result.worst_engine}'s log-probs differ from the trainer's by "
                f"{result.max_abs_diff:.2e} nats, more than weight_sync.probe_tolerance={tolerance:g}"
            )
        return result

    def _evaluate(self, phase: str, version: int) -> dict[str, Any]:
        """Results by set name; see `rollout_service.evaluation`."""
        results = {}
        for name in self.config.evaluation.sets:
            self.log.event(phase, set=name)
            with self._phase(phase):
                results[name] = self.service.evaluate(name, version, self.config.evaluation.timeout_s)
            self.log.evaluation(version, name, results[name])
        return results

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
