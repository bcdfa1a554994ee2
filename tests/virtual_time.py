"""An asyncio event loop whose clock jumps to the next timer: hours of simulated waiting cost no time, and no run differs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that only waits for timers and for other tasks; a task that waits for nothing else stops the run."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            if not self._scheduled:
                raise RuntimeError("deadlock: every task waits for another one")
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
