"""A coroutine as reward: it waits for others (a judge, a sandbox), so many calls run at once in one thread.

The thread has an event loop of its own. A function that blocks it delays its own calls, which then miss their
deadlines; it cannot stall the service. What needs much CPU belongs in a plain function, which runs in processes that
can be killed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from rollout_service.config import RewardSection
from rollout_service.rewards import REWARD_ERROR, REWARD_TIMEOUT, Item, RewardPoolError, Score
from rollout_service.rewards.contract import RewardFunction, load_function, request_of

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class AsyncRule:
    """`reward.concurrency` calls at once of one coroutine function, each with the deadline `reward.timeout_s`."""

    def __init__(self, reward: RewardSection, rule: str) -> None:
        self.rule = rule
        self.last_fault = ""
        self._reward = reward
        self._function: RewardFunction | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"reward {rule}", daemon=True)
        self._slots = asyncio.Semaphore(reward.concurrency)
        self._counts = {"scored": 0, REWARD_TIMEOUT: 0, REWARD_ERROR: 0}
        self._busy_s = 0.0

    @property
    def per_group(self) -> bool:
        return self._function is not None and self._function.per_group

    async def start(self) -> None:
        """Import the function.

        Raises:
            ContractError: it cannot be imported or takes the wrong arguments.
        """
        self._function = await asyncio.to_thread(load_function, self.rule)
        self._thread.start()

    async def score_items(self, items: Sequence[Item]) -> list[Score]:
        """Score one response, or with a rule `per_group` the responses of a group, in one call of the function."""
        if self._function is None or self._loop.is_closed():
            raise RewardPoolError(f"the reward {self.rule} is not running")
        function, request = self._function, request_of(items, self.per_group)

        async def call() -> list[tuple[float, str | None]]:
            return function.verdicts(await function.call(request), len(items))

        async with self._slots:
            began = time.monotonic()
            future = asyncio.run_coroutine_threadsafe(call(), self._loop)
            try:
                verdicts = await asyncio.wait_for(asyncio.wrap_future(future), self._reward.timeout_s)
                self._counts["scored"] += len(items)
                return [Score(acc, extracted) for acc, extracted in verdicts]
            except TimeoutError as error:
                # The function's own TimeoutError arrives here, too, and means the same.
                fault, detail = REWARD_TIMEOUT, str(error) or f"no verdict within {self._reward.timeout_s:g} s"
            except Exception as error:  # the user's function may raise anything; it is counted and never a verdict
                fault, detail = REWARD_ERROR, f"{type(error).__name__}: {error}"
            finally:
                self._busy_s += time.monotonic() - began
        self._counts[fault] += len(items)
        self.last_fault = f"{self.rule}: {detail[:600]}"
        logger.warning("%s: %s: %.600s; gold %.80r", self.rule, fault, detail, items[-1].gold)
        return [Score(0.0, None, fault)] * len(items)

    def stats(self) -> dict[str, float]:
        """Counts since `start` and seconds of all calls."""
        counts = {f"reward/{name.removeprefix('reward_')}": float(n) for name, n in self._counts.items()}
        return counts | {"reward/busy_s": self._busy_s}

    def pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        """Cancel what runs and end the thread; a thread that a function blocks is left behind as a daemon."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the reward %s blocks its thread, which cannot be ended", self.rule)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
