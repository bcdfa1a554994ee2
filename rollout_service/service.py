"""The Ray actor with the service's public calls, and the loop that keeps every slot busy.

Prompts flow: cursor -> scheduler (a slot) -> group runner (engines, reward pool) -> filter -> scheduler (finished, or
dropped and replaced) -> ticket; see `GroupLoop`. The actor runs one event loop, so its state needs no locks.

A failure of the background work (an engine out of restarts, a group out of attempts, a broken reward pool, an
exhausted filter) is kept and raised by every later call: the trainer learns the cause at its next word.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rollout_service.config import ServiceSettings
from rollout_service.curriculum import Curriculum
from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.evaluation import load_eval_prompts, run_evaluation
from rollout_service.filters import GroupFilter
from rollout_service.fleet import Fleet
from rollout_service.group_loop import GroupLoop
from rollout_service.group_runner import GroupRunner
from rollout_service.prompts import Prompt, PromptSource, load_tokenizer, stop_token_ids
from rollout_service.ray_cluster import ACTOR_NAME
from rollout_service.rewards.scorer import RewardScorer
from rollout_service.sample import GroupMeta, Ticket, WeightVersion, pack_group
from rollout_service.scheduler import Scheduler
from rollout_service.server_process import Device
from rollout_service.service_statistics import ServiceStatistics

log = logging.getLogger(__name__)


class ServiceError(RuntimeError):
    """A call that cannot be answered; the message says what the service was doing."""


class RolloutService:
    """See the module docstring. Weight version v is published by `start(v)` or `resume_after_update(v)`.

    Args:
        device: where the engines run.
    """

    def __init__(self, settings: ServiceSettings, device: Device) -> None:
        self._settings = settings
        _log_to(Path(settings.run_dir) / "logs" / "service.log")
        self._scheduler = Scheduler.of(settings.rollout)
        self._filter = GroupFilter(settings.rollout.filter_groups)
        self._fleet = Fleet(settings, device, self._fail)
        self._rewards = RewardScorer(settings.rollout.reward)
        self._source: PromptSource | None = None
        self._runner: GroupRunner | None = None
        self._eval_prompts: dict[str, list[Prompt]] = {}
        self._curriculum: Curriculum | None = None
        self._loop: GroupLoop | None = None
        self._tickets: dict[int, Ticket] = {}
        self._changed = asyncio.Event()
        self._evaluations = 0
        self._updating = False
        self._failure: BaseException | None = None
        self._started: asyncio.Future[dict[str, Any]] | None = None
        self._closed = False
        self._statistics = ServiceStatistics(self._fleet, self._filter, self._rewards, self._scheduler)

    # Start and stop

    async def start(self, version: WeightVersion, state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Start engines and reward workers, load the prompts, begin to generate. Repeating the call is harmless.

        Args:
            version: weight version that the run starts with.
            state: `state_dict()` of an earlier run. The engines then wait for the trainer to publish `version`
                (pause_for_update, resume_after_update with step None) before their first token. Without it the weights
                of `settings.model_path` are those of `version`.

        Returns:
            `{"engines": [EngineEndpoint, ...], "data": counts of PromptSource.report}`.
        """
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            try:
                self._started.set_result(await self._start(version, state))
            except BaseException as error:
                self._fail(error)
                self._started.set_result({})
                raise
        result = await asyncio.shield(self._started)
        self._raise_failure()
        return result

    async def _start(self, version: WeightVersion, state: dict[str, Any] | None) -> dict[str, Any]:
        settings = self._settings
        self._scheduler.version = version
        prompts = asyncio.create_task(asyncio.to_thread(self._load_prompts))
        engines = asyncio.create_task(self._fleet.start(version, weights_on_disk=state is None))
        try:
            await self._rewards.start()
            tokenizer, self._source, self._eval_prompts = await prompts  # bad data is reported before engines are up
            await self._rewards.check(self._source.first.text, self._source.first.answer)
            endpoints = await engines
        except BaseException:
            engines.cancel()
            await asyncio.gather(prompts, engines, return_exceptions=True)
            raise

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        stop_ids = stop_token_ids(settings.model_path, tokenizer)
        self._runner = GroupRunner(settings.rollout, self._fleet, self._rewards, decode, stop_ids, settings.seed)
        self._curriculum = Curriculum(settings.rollout.curriculum, len(self._source))
        parts = (self._scheduler, self._filter, self._curriculum, self._source.next, self._runner.run_training_group)
        self._loop = GroupLoop(
            *parts, lambda group: ray.put(pack_group(group)), self._changed, self._fail, self._statistics.running
        )
        self._statistics.watch(self._runner, self._loop, self._curriculum)
        if state is not None:
            self._source.load_state_dict(state["source"])
            self._curriculum.load_state_dict(state["curriculum"])
            self._scheduler.load_state_dict(state["scheduler"])
            self._loop.load_state_dict(state["prompts"])
        self._gate()
        self._loop.start()
        return {"engines": endpoints, "data": dict(self._source.report)}

    def _load_prompts(self) -> tuple[Any, PromptSource, dict[str, list[Prompt]]]:
        settings = self._settings
        tokenizer = load_tokenizer(settings.model_path, settings.trust_remote_code)
        source = PromptSource(settings.data, tokenizer, settings.seed)
        sets = {
            name: load_eval_prompts(section, settings.data, tokenizer)
            for name, section in settings.evaluation.sets.items()
        }
        return tokenizer, source, sets

    async def until_failure(self) -> None:
        """Wait until the background work fails, and raise its failure; returns at `shutdown`."""
        while not self._closed:
            self._raise_failure()
            await asyncio.sleep(0.2)

    async def shutdown(self) -> None:
        """End every process of the service. Repeating the call is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            await self._loop.stop()
        await asyncio.gather(self._rewards.close(), self._fleet.close())

    # Batches

    async def next_batch(self, step: int) -> dict[str, Any]:
        """Wait until the batch of `step` is ready.

        Returns:
            `{"step", "version", "republish"}`. `republish` true means that no batch is ready and none can be: every
            engine was restarted and waits for the current weights. The trainer then publishes them once more
            (pause_for_update(version), the update, resume_after_update(version, None)) and asks again.

        Raises:
            ServiceError: not ready within `rollout.batch_timeout_s`; the message holds the queue's state.
            Exception: the stored failure of the background work.
        """
        republish = not await self._wait_for_batch(step)
        return {"step": step, "version": self._fleet.version, "republish": republish}

    async def ticket(self, step: int) -> Ticket:
        """The ticket of `step`; the same one until the step is trained."""
        if not await self._wait_for_batch(step):
            raise ServiceError(
                f"no batch for step {step}: the engines were restarted and wait for weights of version "
                f"{self._fleet.version}; publish them again (next_batch says republish)"
            )
        return self._tickets[step]

    async def _wait_for_batch(self, step: int) -> bool:
        """True when the ticket of `step` exists, False when only a new publication of the weights can help."""
        await self._until_started()
        limit = self._settings.rollout.batch_timeout_s
        deadline = time.monotonic() + limit
        while step not in self._tickets:
            self._raise_failure()
            if self._scheduler.batch_ready():
                self._make_ticket(step)
                break
            if self._fleet.needs_weights() and not self._updating:
                return False
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"no batch for step {step} within rollout.batch_timeout_s={limit:g}: {self._situation()}"
                )
            self._changed.clear()
            try:
                async with asyncio.timeout(1.0):  # engines change without a word
                    await self._changed.wait()
            except TimeoutError:
                continue
        return True

    def _make_ticket(self, step: int) -> None:
        assert self._loop is not None
        groups = self._scheduler.take(step)
        self._tickets[step] = Ticket(
            step=step,
            groups=[GroupMeta.of(group) for group in groups],
            refs=[self._loop.refs[group.order] for group in groups],
            stats=self._statistics.since_last_ticket(),
        )

    def _situation(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in self._scheduler.counts().items())
        paused = ", admission paused" if self._loop is None or not self._loop.admission.is_set() else ""
        return f"groups: {counts}{paused}; {self._fleet.states()}; filter: {self._filter.words()}"

    async def take_warnings(self) -> list[str]:
        """What a user should see at once, since the last call. A waiting trainer asks every few seconds."""
        return self._filter.take_warnings()

    # Weight updates

    async def pause_for_update(self, version: WeightVersion) -> list[EngineEndpoint]:
        """Stop admission and generation; name the engines that are to get the weights of `version`.

        Args:
            version: the current version plus one, or the current one again (engines that lost it).
        """
        await self._until_started()
        self._raise_failure()
        current = self._fleet.version
        if version not in (current, current + 1):
            raise ServiceError(f"version {version} cannot be published after {current}: versions grow by one")
        self._updating = True
        self._gate()
        endpoints = await self._fleet.pause(drain=self._settings.rollout.update_mode == "drain")
        self._raise_failure()
        self._statistics.paused(True)
        return endpoints

    async def resume_after_update(self, version: WeightVersion, step: int | None) -> None:
        """Publish `version`, go on generating with it, and free the slots of the trained `step` (if any)."""
        self._raise_failure()
        if not self._updating:
            if step is None or version == self._fleet.version == self._scheduler.version:
                return  # asked twice
            raise ServiceError(f"resume_after_update({version}, step={step}) without pause_for_update before it")
        await self._fleet.resume(version)
        self._updating = False
        self._statistics.paused(False)
        if step is not None:
            trained = self._scheduler.take(step)
            self._scheduler.trained(step, version)
            if self._loop is not None:
                self._loop.trained(trained)
            for old in [ticket for ticket in self._tickets if ticket <= step]:
                del self._tickets[old]
        else:
            self._scheduler.version = version
        self._gate()

    async def load_from_disk(self, path: str, version: WeightVersion) -> None:
        """Let every engine load the HF folder `path` as `version`; pauses and resumes unless an update is under way."""
        if self._updating:
            await self._fleet.load_from_disk(path, version)
            return
        await self.pause_for_update(version)
        try:
            await self._fleet.load_from_disk(path, version)
        except EngineError:
            # A refused folder leaves the engines as they were: they go on with the version of before.
            await self.resume_after_update(self._fleet.version, None)
            raise
        await self.resume_after_update(version, None)

    # Evaluation and probes

    async def evaluate(self, name: str, version: WeightVersion) -> dict[str, dict[str, float]]:
        """Evaluate a held-out set with the weights of `version`; training prompts are not admitted meanwhile.

        Returns:
            `{"greedy": metrics, "sampled": metrics}`, each if the set asks for it; see `evaluation_metrics`.
        """
        await self._until_started()
        self._raise_failure()
        sets = self._settings.evaluation.sets
        if name not in sets:
            raise ServiceError(f"no evaluation set {name!r}; evaluation.sets has {sorted(sets)}")
        if version != self._fleet.version:
            raise ServiceError(f"the engines hold version {self._fleet.version}, not {version}")
        assert self._runner is not None
        limit = self._settings.evaluation.timeout_s
        self._evaluations += 1
        self._gate()
        try:
            async with asyncio.timeout(limit):
                return await run_evaluation(self._runner, name, sets[name], self._eval_prompts[name])
        except TimeoutError as error:
            raise ServiceError(f"evaluation of {name!r} took more than {limit:g} s: {self._fleet.states()}") from error
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._evaluations -= 1
            self._gate()

    async def probe(self, sequences: list[list[int]], starts: list[int]) -> dict[int, list[np.ndarray]]:
        """Each ready engine's untempered log-probs of `sequences[i][starts[i]:]`."""
        await self._until_started()
        self._raise_failure()
        return await self._fleet.probe(sequences, starts)

    # State and numbers

    async def state_dict(self) -> dict[str, Any]:
        """Cursor, queue, and the prompts admitted but unfinished: with it no prompt is lost or repeated."""
        await self._until_started()
        assert self._source is not None and self._curriculum is not None and self._loop is not None
        return {
            "source": self._source.state_dict(),
            "curriculum": self._curriculum.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "prompts": self._loop.state_dict(),
        }

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refused: a running service has prompts in flight. Give the state to `start`."""
        raise ServiceError("the state of an earlier run is given to start(version, state), before anything runs")

    async def metrics(self) -> dict[str, float]:
        """Totals since the start, by metric name."""
        return self._statistics.totals()

    # Inside

    def _gate(self) -> None:
        """Admission is open while no update and no evaluation is under way and nothing has failed."""
        if self._loop is not None:
            if self._updating or self._evaluations or self._closed or self._failure is not None:
                self._loop.admission.clear()
            else:
                self._loop.admission.set()
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not self._closed:
            log.error("the service cannot go on", exc_info=error)
            self._failure = error
        self._gate()

    def _raise_failure(self) -> None:
        if self._closed:
            raise ServiceError("the service was shut down")
        if self._failure is not None:
            raise self._failure

    async def _until_started(self) -> None:
        engine = self._settings.rollout.engine
        limit = engine.startup_timeout_s + self._settings.ray.start_timeout_s
        deadline = time.monotonic() + limit
        while self._started is None or not self._started.done():
            self._raise_failure()
            if time.monotonic() > deadline:
                raise ServiceError(f"the service was not started within {limit:g} s: {self._fleet.states()}")
            await asyncio.sleep(0.1)
        self._raise_failure()


def start_service(settings: ServiceSettings) -> Any:
    """Create the actor in the connected cluster, under its name in the current namespace; returns its handle.

    It ends with the process that created it. Call `start` on it next.
    """
    gpus = ray.cluster_resources().get("GPU", 0)
    device: Device = "cuda" if gpus and settings.sglang.get("device", "cuda") == "cuda" else "cpu"
    wanted = settings.rollout.engine.count * settings.rollout.engine.tp_size
    if device == "cuda" and gpus < wanted:
        raise ServiceError(
            f"rollout.engine.count x tp_size = {wanted} GPUs, but the Ray cluster has {gpus:g}; lower them, add "
            "machines, or set sglang.device=cpu"
        )
    variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    actor = ray.remote(RolloutService).options(
        name=ACTOR_NAME, num_cpus=0, max_restarts=0, max_concurrency=1000, runtime_env={"env_vars": variables}
    )
    return actor.remote(settings, device)


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("rollout_service").addHandler(handler)
    logging.getLogger("rollout_service").setLevel(logging.INFO)
