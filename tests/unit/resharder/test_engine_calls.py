"""Who is at fault when engines fail in a weight update: scripts of plain functions in the place of HTTP calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dapo_megatron.resharder.engine_calls import Call, EngineCalls, Verdict
from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.weights_client import WeightsClient

VICTIM = (
    "engine refused /update_weights_from_distributed with 400: Failed to receive weights: Connection closed by peer"
)
Script = list[Callable[[WeightsClient], None]]


@pytest.fixture(autouse=True)
def all_answer_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCalls, "_alive", lambda self, engine: True)


def run(scripts: dict[int, Script], timeout_s: float = 5.0) -> tuple[Verdict, EngineCalls, int]:
    """Returns the verdict, the calls, and how often a failure was announced."""
    announced: list[float] = []
    calls = EngineCalls(
        {i: WeightsClient(EngineEndpoint(i, f"http://engine-{i}", None, 1, alive=True), 1.0) for i in scripts},
        {i: [Call("send", f"turn {n}", step) for n, step in enumerate(script)] for i, script in scripts.items()},
        leave_groups=(),
        on_failure=lambda: announced.append(time.monotonic()),
        timeout_s=timeout_s,
    )
    return calls.wait(), calls, len(announced)


def fine(_: WeightsClient) -> None:
    time.sleep(0.01)


def fails_with(message: str) -> Callable[[WeightsClient], None]:
    def step(_: WeightsClient) -> None:
        raise EngineError(message)

    return step


def test_all_engines_reached() -> None:
    verdict, calls, announced = run({0: [fine, fine], 1: [fine, fine]})
    assert verdict == Verdict((0, 1), {}, ())
    assert announced == 0
    assert [calls.progress[i].count("send") for i in (0, 1)] == [2, 2]
    assert 0.01 < calls.phase_seconds(time.monotonic() - 1.0)["send"] < 1.01


def test_an_engine_that_refuses_is_lost_and_those_that_suffer_are_tried_again() -> None:
    verdict, calls, announced = run({0: [fine, fails_with("refused: bad tensor")], 1: [fine, fine, fails_with(VICTIM)]})
    assert verdict == Verdict((), {0: "turn 1: refused: bad tensor"}, (1,))
    assert announced >= 2
    assert calls.progress[1].count("send") == 2


def test_an_engine_that_does_not_answer_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCalls, "_alive", lambda self, engine: engine != 1)
    verdict, _, _ = run({0: [fails_with(VICTIM)], 1: [fails_with(VICTIM)], 2: [fine]})
    assert verdict == Verdict((2,), {1: f"turn 0: {VICTIM}"}, (0,))


def test_when_nobody_is_at_fault_the_first_to_fail_is_left_out() -> None:
    def later(client: WeightsClient) -> None:
        time.sleep(0.2)
        fails_with(VICTIM)(client)

    verdict, _, _ = run({0: [later], 1: [fails_with(VICTIM)]})
    assert set(verdict.lost) == {1}
    assert verdict.again == (0,)


def test_a_silent_engine_is_named_after_the_deadline() -> None:
    forever = threading.Event()

    def hangs(_: WeightsClient) -> None:
        forever.wait(30)

    began = time.monotonic()
    verdict, _, announced = run({0: [fine], 7: [fine, hangs]}, timeout_s=0.3)
    assert verdict.reached == (0,)
    assert verdict.lost == {7: "engine 7 (http://engine-7) did not answer turn 1 within 0 s"}
    assert announced == 1
    assert 0.3 < time.monotonic() - began < 3
    forever.set()
