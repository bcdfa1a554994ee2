"""Custom rewards as a user would write them, for the tests to name by import path."""

from __future__ import annotations

import asyncio
import os
import signal
import time

LATE_S = 60.0


def length(response: str) -> float:
    return float(len(response))


def equal(gold: str, response: str) -> tuple[float, str]:
    last = response.split()[-1] if response.split() else ""
    return float(last == gold), last


def with_everything(prompt: str, gold: str, response: str, truncated: bool, scale: float = 0.5) -> float:
    return scale * (gold in response) * (prompt == "1+6=") * (not truncated)


def shortest_of_group(gold: str, responses: list[str]) -> list[float]:
    shortest = min(map(len, responses))
    return [float(len(response) == shortest and gold in response) for response in responses]


async def judge(gold: str, response: str) -> float:
    await asyncio.sleep(0.2)
    if "late" in response:
        await asyncio.sleep(LATE_S)
    if "raise" in response:
        raise ConnectionError("the judge is away")
    return float(gold in response)


async def judge_group(responses: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(index == 0) for index in range(len(responses))]


async def blocking_judge(response: str) -> float:
    if "block" in response:
        time.sleep(2.0)
    return 1.0


def hostile(response: str) -> float:
    if "hang" in response:
        while True:
            pass
    if "die" in response:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in response:
        raise KeyError("score")
    if "nonsense" in response:
        return {"score": 1}  # type: ignore[return-value]
    return 1.0


def returns_a_dict(response: str) -> dict[str, float]:
    return {"score": 1.0}


def returns_nan(response: str) -> float:
    return float("nan")


def returns_one_for_all(responses: list[str]) -> float:
    return 1.0


def hangs(response: str) -> float:
    while True:
        pass


def asks_for_more(response: str, ground_truth: str) -> float:
    return 0.0


def knows_no_response(gold: str) -> float:
    return 0.0


not_a_function = 7
