"""All engines together: routing, health, restarts, pauses, weight versions.

Requests wait here, ordered by priority, until an engine has a free place (`max_running_requests` each), so that a
request's deadline runs only while an engine works on it. The least loaded engine gets the next one. A request whose
engine goes away goes back to the queue and runs again from its prompt.

An engine is `READY` (gets requests), `STALE` (up, but its weights are not those of the current version: it gets none
until an update reaches it) or `STARTING`. A restarted engine loads the last published weights if they lie on disk
(the starting checkpoint before the first update, else the last disk export) and is stale otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions

from rollout_service.config import ServiceSettings
from rollout_service.engine import (
    Completion,
    EngineClient,
    EngineEndpoint,
    EngineError,
    EngineUnavailable,
    vocabulary_size,
)
from rollout_service.sample import WeightVersion
from rollout_service.server_process import Device, SglangServer
from rollout_service.weights_folder import held

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 30.0  # SGLang itself gives a probe 20 s
STOP_TIMEOUT_S = 5.0
HEALTH_FAILURES = 3  # in a row, before an engine whose process lives counts as hung


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STALE = "stale"


@dataclass(slots=True)
class Engine:
    """One engine's place in the fleet. Its server (and with it `client`) changes at a restart; its id stays."""

    engine_id: int
    state: EngineState = EngineState.STARTING
    actor: Any = None
    client: EngineClient | None = None
    running: int = 0
    restarts: int = 0
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> EngineEndpoint:
        if self.client is None:
            raise EngineError(f"engine {self.engine_id} is not up")
        return self.client.endpoint


class Fleet:
    """The engines of one service. Use it inside one event loop.

    Args:
        on_failure: called once with the error when the fleet cannot go on (an engine used up its restarts).
    """

    def __init__(self, settings: ServiceSettings, device: Device, on_failure: Callable[[BaseException], None]) -> None:
        self._settings = settings
        self._device: Device = device
        self._on_failure = on_failure
        self.engines = [Engine(engine_id) for engine_id in range(settings.rollout.engine.count)]
        self.version: WeightVersion = 0
        self.published: set[WeightVersion] = set()
        self._on_disk: tuple[str, WeightVersion] = (settings.model_path, 0)
        self._failed = False
        self._paused = False
        self._pauses = 0
        self._updating: list[Engine] = []
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[Engine]]] = []
        self._tickets = itertools.count()
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self.counters = {"requeued": 0, "restarts": 0, "unpublished": 0}

    async def start(self, version: WeightVersion, weights_on_disk: bool) -> list[EngineEndpoint]:
        """Start all engines.

        Args:
            version: the version that the run starts with.
            weights_on_disk: whether `settings.model_path` holds the weights of `version`; if not, the engines stay
                stale until an update brings them.

        Raises:
            EngineError: an engine did not start; the message ends with its log's tail.
        """
        self.version = version
        self.published = {version}
        self._on_disk = (self._settings.model_path, version if weights_on_disk else version - 1)
        await asyncio.gather(*(self._start_engine(engine) for engine in self.engines))
        self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        return self.endpoints()

    async def close(self) -> None:
        """Stop watching, end every server."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        up = [engine for engine in self.engines if engine.state in _UP]
        await asyncio.gather(*(self._stop_engine(engine) for engine in up))
        for engine in self.engines:
            if engine.actor is not None:
                ray.kill(engine.actor)  # a server that it is starting ends with it

    def endpoints(self) -> list[EngineEndpoint]:
        return [engine.endpoint for engine in self.engines if engine.client is not None]

    def needs_weights(self) -> bool:
        """Whether requests can only go on after the trainer publishes its current weights once more."""
        states = {engine.state for engine in self.engines}
        return EngineState.STALE in states and EngineState.READY not in states and EngineState.STARTING not in states

    def states(self) -> str:
        """One line for error messages."""
        return ", ".join(f"engine {e.engine_id} {e.state} ({e.running} running)" for e in self.engines)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        rid: str,
        priority: tuple[int, ...],
        routed_experts: bool = False,
    ) -> Completion:
        """Complete one prompt on some engine; smaller priorities go first. See `EngineClient.generate`.

        Raises:
            EngineError: the engine refused the request, contradicted itself, took too long, or used weights of a
                version that was never published.
        """
        for attempt in itertools.count():
            engine = await self._acquire(priority)
            client = engine.client
            assert client is not None
            try:
                name = f"{rid}-{attempt}" if attempt else rid
                completion = await client.generate(prompt_ids, sampling, name, routed_experts)
            except EngineUnavailable as error:
                log.warning("%s goes back to the queue: %s", rid, error)
                self.counters["requeued"] += 1
                if engine.client is client:
                    engine.suspect.set()
                continue
            finally:
                engine.running -= 1
                self._dispatch()
            self._check_published(completion, client.name, rid)
            return completion
        raise AssertionError("unreachable")

    def _check_published(self, completion: Completion, name: str, rid: str) -> None:
        strange = sorted({version for version, _ in completion.versions} - self.published)
        if strange:
            self.counters["unpublished"] += 1
            raise EngineError(
                f"{name} sampled {rid} with weights of version {strange}, which this service did not publish "
                f"(current: {self.version})"
            )

    async def probe(self, sequences: list[list[int]], starts: list[int]) -> dict[int, list[np.ndarray]]:
        """Untempered log-probs of `sequences[i][starts[i]:]` from every ready engine."""
        ready = [engine for engine in self.engines if engine.state is EngineState.READY]

        async def ask(engine: Engine) -> list[np.ndarray]:
            assert engine.client is not None
            client = engine.client
            pairs = zip(sequences, starts, strict=True)
            return list(await asyncio.gather(*(client.input_logprobs(list(ids), start) for ids, start in pairs)))

        replies = await asyncio.gather(*(ask(engine) for engine in ready))
        return {engine.engine_id: reply for engine, reply in zip(ready, replies, strict=True)}

    # Weight updates

    async def pause(self, drain: bool) -> list[EngineEndpoint]:
        """Stop generation for a weight update and name the engines that should get the weights.

        Args:
            drain: let running requests finish first; else they give up their cache and continue afterwards.
        """
        self._paused = True  # nothing new is sent from here on
        self._pauses += 1
        if drain:
            limit = self._settings.rollout.engine.request_timeout_s
            try:
                async with asyncio.timeout(limit):
                    while any(engine.running for engine in self.engines):
                        await asyncio.sleep(0.01)
            except TimeoutError as error:
                raise EngineError(f"requests did not finish within {limit:g} s: {self.states()}") from error
        limit = self._settings.rollout.engine.startup_timeout_s
        deadline = time.monotonic() + limit
        while not self._failed:
            up = [engine for engine in self.engines if engine.client is not None and engine.state in _UP]
            paused = await asyncio.gather(*(self._pause_engine(engine) for engine in up))
            self._updating = [engine for engine, ok in zip(up, paused, strict=True) if ok]
            if self._updating:
                break
            if time.monotonic() > deadline:
                raise EngineError(f"no engine came up within {limit:g} s to take new weights: {self.states()}")
            await asyncio.sleep(0.2)  # all of them are being restarted
        return [engine.endpoint for engine in self._updating]

    async def resume(self, version: WeightVersion) -> None:
        """Publish `version`, drop the prefix caches and go on generating.

        An engine of the update that does not report `version` did not get it whole and is restarted.

        Raises:
            EngineError: no engine holds `version`.
        """
        engines, self._updating = self._updating, []
        held = await asyncio.gather(*(self._held_weights(engine) for engine in engines))
        reached = [weights is not None and weights[0] == version for weights in held]
        if not any(reached):
            raise EngineError(f"no engine holds weights of version {version} after the update: {self.states()}")
        self.version = version
        self.published.add(version)
        for weights in held:
            if weights is not None and weights[0] == version and weights[1] != self._on_disk[0]:
                self._on_disk = (weights[1], version)  # the trainer let the engines load a new folder
        for engine, ok in zip(engines, reached, strict=True):
            engine.state = EngineState.READY if ok else EngineState.STALE
            if not ok:
                engine.suspect.set()
        for engine in self.engines:
            if engine not in engines and engine.state is EngineState.READY:
                engine.state = EngineState.STALE  # it came up during the update, with the weights of before
        await asyncio.gather(*(self._continue_engine(e) for e, ok in zip(engines, reached, strict=True) if ok))
        self._paused = False
        self._dispatch()

    async def load_from_disk(self, path: str, version: WeightVersion) -> None:
        """Give every engine the weights of a HF folder, as `version`. Call it between `pause` and `resume`."""
        timeout_s = self._settings.rollout.engine.startup_timeout_s
        clients = [engine.client for engine in self._updating if engine.client is not None]
        results = await asyncio.gather(
            *(client.load_from_disk(path, version, timeout_s) for client in clients), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and len(errors) == len(results):
            raise errors[0]
        for error in errors:
            log.error("%s", error)  # resume() finds the version missing there and restarts the engine
        self._on_disk = (path, version)

    async def _pause_engine(self, engine: Engine) -> bool:
        assert engine.client is not None
        try:
            await engine.client.pause("retract")
        except EngineError as error:
            log.error("left out of the weight update: %s", error)
            engine.suspect.set()
            return False
        return True

    async def _held_weights(self, engine: Engine) -> tuple[WeightVersion, str] | None:
        if engine.client is None:
            return None
        try:
            return await engine.client.weights()
        except EngineError as error:
            log.error("%s", error)
            return None

    async def _continue_engine(self, engine: Engine) -> None:
        assert engine.client is not None
        try:
            await engine.client.flush_cache()
            await engine.client.resume()
        except EngineError as error:
            log.error("%s", error)
            engine.state = EngineState.STALE
            engine.suspect.set()

    # Routing

    async def _acquire(self, priority: tuple[int, ...]) -> Engine:
        """Wait for a place on an engine; the caller gives it back by lowering `running`."""
        place: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._tickets), place))
        self._dispatch()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # granted at the moment of cancellation
                place.result().running -= 1
                self._dispatch()
            raise

    def _dispatch(self) -> None:
        limit = self._settings.rollout.engine.max_running_requests
        while self._waiting and not self._paused:
            if self._waiting[0][2].done():  # cancelled while it waited
                heapq.heappop(self._waiting)
                continue
            free = [e for e in self.engines if e.state is EngineState.READY and e.running < limit]
            if not free:
                return
            engine = min(free, key=lambda candidate: (candidate.running, candidate.engine_id))
            engine.running += 1
            heapq.heappop(self._waiting)[2].set_result(engine)

    # Life and death of engines

    async def _start_engine(self, engine: Engine) -> None:
        if engine.actor is None:
            gpus = self._settings.rollout.engine.tp_size if self._device == "cuda" else 0
            server = ray.remote(SglangServer).options(num_cpus=0, num_gpus=gpus, max_restarts=0)
            engine.actor = server.remote(self._settings, engine.engine_id, self._device)
        path, version = self._on_disk
        limit = self._settings.rollout.engine.startup_timeout_s + 60.0  # the server's own limit comes first
        try:
            async with asyncio.timeout(limit):
                with contextlib.ExitStack() as stack:
                    if path != self._settings.model_path:
                        # The trainer removes old versions, but not one that is being loaded.
                        found = stack.enter_context(held(Path(path), f"engine-{engine.engine_id}"))
                        if not found:
                            path, version = self._settings.model_path, version - 1  # start stale
                    endpoint = await engine.actor.start.remote(path, version)
        except TimeoutError as error:
            raise EngineError(f"engine {engine.engine_id}: Ray did not start its actor in {limit:g} s") from error
        except ray.exceptions.RayTaskError as error:
            raise EngineError(str(error.cause or error)) from error
        except ray.exceptions.RayActorError as error:
            engine.actor = None
            raise EngineError(f"engine {engine.engine_id}: its Ray actor ended: {error}") from error
        section = self._settings.rollout.engine
        vocab_size = vocabulary_size(self._settings.model_path)
        engine.client = EngineClient(
            endpoint, vocab_size, section.request_timeout_s, section.control_timeout_s, self._settings.routing
        )
        engine.state = EngineState.READY if version == self.version else EngineState.STALE
        self._dispatch()

    async def _stop_engine(self, engine: Engine) -> None:
        engine.state = EngineState.STARTING
        if engine.client is not None:
            await engine.client.close()
            engine.client = None
        if engine.actor is not None:
            with contextlib.suppress(ray.exceptions.RayActorError, TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await engine.actor.stop.remote()

    async def _watch(self, engine: Engine) -> None:
        """Restart the engine when its process is gone, when it hangs, or when an update left it half done."""
        failures = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.rollout.engine.health_interval_s):
                    await engine.suspect.wait()
            suspected = engine.suspect.is_set()
            engine.suspect.clear()
            if not await self._process_runs(engine):
                cause = "its server process ended"
            elif suspected and engine.state is EngineState.STALE:
                cause = "a weight update did not reach it"
            else:
                failures = 0 if await self._answers(engine) else failures + 1
                if failures == 0:
                    continue
                if failures < HEALTH_FAILURES:
                    engine.suspect.set()  # look again at once
                    continue
                cause = f"it failed {failures} health probes in a row"
            failures = 0
            try:
                await self._restart(engine, cause)
            except EngineError as error:
                self._failed = True
                self._on_failure(error)
                return

    async def _process_runs(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await engine.actor.poll.remote() is None
        except TimeoutError:
            return True  # a busy machine; the HTTP probes decide
        except ray.exceptions.RayActorError:
            engine.actor = None
            return False

    async def _answers(self, engine: Engine) -> bool:
        """Whether the server answers; unless it is paused, also whether its scheduler makes progress."""
        if engine.client is None:
            return False
        pauses = self._pauses
        alive = await engine.client.health(HEALTH_TIMEOUT_S, generate=not self._paused)
        return alive or pauses != self._pauses  # a pause that began meanwhile spoils the probe

    async def _restart(self, engine: Engine, cause: str) -> None:
        limit = self._settings.rollout.engine.max_restarts
        tail = ""
        if engine.actor is not None:
            with contextlib.suppress(ray.exceptions.RayActorError):
                tail = await engine.actor.log_tail.remote()
        log.error("engine %d: %s; end of its log:\n%s", engine.engine_id, cause, tail)
        if engine in self._updating:
            self._updating.remove(engine)
        await self._stop_engine(engine)
        while True:
            if engine.restarts >= limit:
                raise EngineError(
                    f"engine {engine.engine_id}: {cause}, and rollout.engine.max_restarts={limit} is used up. "
                    f"End of its log:\n{tail}"
                )
            engine.restarts += 1
            self.counters["restarts"] += 1
            log.warning("engine %d: restart %d of %d", engine.engine_id, engine.restarts, limit)
            try:
                await self._start_engine(engine)
                return
            except EngineError as error:
                cause, tail = "it did not start again", str(error)


_UP = (EngineState.READY, EngineState.STALE)
