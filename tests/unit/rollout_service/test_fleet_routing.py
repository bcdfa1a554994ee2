"""Routing, re-queueing and version checks of the fleet, with engines that are plain Python objects."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_service.engine import Completion, EngineError, EngineUnavailable
from rollout_service.fleet import EngineState, Fleet
from rollout_service.sample import FinishReason
from tests.service_settings import service_settings


class PlainEngine:
    """Answers when told to; `log` holds the request ids in the order in which they came."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = 0
        self.failures = 0
        self.most = self.now = 0

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], rid: str, routed_experts: bool = False
    ) -> Completion:
        self.log.append(rid)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
            if self.failures:
                self.failures -= 1
                raise EngineUnavailable(f"{self.name} is gone")
        finally:
            self.now -= 1
        ids = np.array([5, 6], dtype=np.int32)
        return Completion(ids, np.zeros(2, dtype=np.float32), ((self.version, 2),), FinishReason.STOP)


def make_fleet(tmp_path: Path, count: int, places: int) -> tuple[Fleet, list[PlainEngine]]:
    engine = {"count": count, "max_running_requests": places}
    fleet = Fleet(service_settings(tmp_path, tmp_path, rollout={"engine": engine}), "cpu", on_failure=lambda e: None)
    fleet.published = {0}
    plain = [PlainEngine(f"engine {i}") for i in range(count)]
    for place, client in zip(fleet.engines, plain, strict=True):
        place.client = client  # type: ignore[assignment]
        place.state = EngineState.READY
    return fleet, plain


def test_no_engine_gets_more_than_its_places_and_the_load_is_even(tmp_path: Path) -> None:
    async def work() -> None:
        fleet, engines = make_fleet(tmp_path, count=2, places=3)
        calls = [fleet.generate([1], {}, f"r{i}", (1, i)) for i in range(20)]
        assert len(await asyncio.gather(*calls)) == 20
        assert [engine.most for engine in engines] == [3, 3]
        assert [engine.running for engine in fleet.engines] == [0, 0]

    asyncio.run(work())


def test_older_groups_and_evaluations_go_first(tmp_path: Path) -> None:
    async def work() -> None:
        fleet, (engine,) = make_fleet(tmp_path, count=1, places=1)
        engine.gate.clear()
        first = asyncio.create_task(fleet.generate([1], {}, "first", (1, 9, 0)))
        await asyncio.sleep(0.01)
        priorities = {"young": (1, 8, 0), "old-b": (1, 2, 1), "old-a": (1, 2, 0), "evaluation": (0, 7, 0)}
        rest = [asyncio.create_task(fleet.generate([1], {}, rid, p)) for rid, p in priorities.items()]
        await asyncio.sleep(0.01)
        engine.gate.set()
        await asyncio.gather(first, *rest)
        assert engine.log == ["first", "evaluation", "old-a", "old-b", "young"]

    asyncio.run(work())


def test_request_of_a_lost_engine_runs_again_under_a_new_id(tmp_path: Path) -> None:
    async def work() -> None:
        fleet, engines = make_fleet(tmp_path, count=2, places=1)
        engines[0].failures = 1
        assert (await fleet.generate([1], {}, "r", (1, 0))).ids.tolist() == [5, 6]
        assert engines[0].log == ["r", "r-1"] or (engines[0].log, engines[1].log) == (["r"], ["r-1"])
        assert fleet.counters["requeued"] == 1
        assert fleet.engines[0].suspect.is_set()

    asyncio.run(work())


def test_stale_engine_gets_nothing_and_the_fleet_says_that_it_needs_weights(tmp_path: Path) -> None:
    async def work() -> None:
        fleet, engines = make_fleet(tmp_path, count=2, places=1)
        fleet.engines[0].state = EngineState.STALE
        await asyncio.gather(*(fleet.generate([1], {}, f"r{i}", (1, i)) for i in range(4)))
        assert (len(engines[0].log), len(engines[1].log)) == (0, 4)
        assert not fleet.needs_weights()
        fleet.engines[1].state = EngineState.STARTING
        assert not fleet.needs_weights()  # it may come back with the weights of a disk export
        fleet.engines[1].state = EngineState.STALE
        assert fleet.needs_weights()

    asyncio.run(work())


def test_cancelled_request_gives_its_place_back(tmp_path: Path) -> None:
    async def work() -> None:
        fleet, (engine,) = make_fleet(tmp_path, count=1, places=1)
        engine.gate.clear()
        running, waiting = (asyncio.create_task(fleet.generate([1], {}, f"r{i}", (1, i))) for i in range(2))
        await asyncio.sleep(0.01)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        engine.gate.set()
        await asyncio.wait_for(fleet.generate([1], {}, "next", (1, 2)), 1.0)
        assert fleet.engines[0].running == 0

    asyncio.run(work())


def test_version_that_was_never_published_is_rejected(tmp_path: Path) -> None:
    async def work() -> None:
        fleet, (engine,) = make_fleet(tmp_path, count=1, places=1)
        engine.version = 7
        with pytest.raises(EngineError, match=r"engine 0 sampled r with weights of version \[7\]"):
            await fleet.generate([1], {}, "r", (1, 0))
        assert fleet.counters["unpublished"] == 1

    asyncio.run(work())
