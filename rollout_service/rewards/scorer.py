"""All rules of a run behind one face: the main rule gives `acc`, the extra ones add to the reward.

    reward = incorrect + (correct - incorrect) acc  +  sum_i weight_i score_i  +  P(length)

A built-in rule or a plain function runs in a `RewardPool`, a coroutine function in an `AsyncRule`, an address in an
`HttpRule`. A fault of any rule is a fault of the sample.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Protocol

from rollout_service.config import RewardSection
from rollout_service.rewards import REWARD_ERROR, Item, RewardPoolError, Score
from rollout_service.rewards.async_rule import AsyncRule
from rollout_service.rewards.contract import is_url
from rollout_service.rewards.http_rule import HttpRule
from rollout_service.rewards.pool import RewardPool

# A rule's name is part of a metric's name; an address has slashes.
_NOT_A_NAME = re.compile(r"[^\w.:-]+")


class RuleRunner(Protocol):
    """What runs one rule. `score_items` takes one item, or with `per_group` those of one group; it never raises for a
    bad item. `last_fault` is the last fault in words."""

    rule: str
    last_fault: str

    @property
    def per_group(self) -> bool: ...
    async def start(self) -> None: ...
    async def score_items(self, items: Sequence[Item]) -> list[Score]: ...
    def stats(self) -> dict[str, float]: ...
    def pids(self) -> list[int]: ...
    async def close(self) -> None: ...


class RewardScorer:
    """The rules of one configuration. Belongs to one event loop; see `RewardPool` about its thread."""

    def __init__(self, reward: RewardSection) -> None:
        self._reward = reward
        self._runners: list[RuleRunner] = []
        self._weights = [1.0, *(extra.weight for extra in reward.extra_rules)]
        self._last_fault = ""

    @property
    def per_group(self) -> bool:
        """Whether a rule judges whole groups, so that `score_group` must be used."""
        return any(runner.per_group for runner in self._runners)

    async def start(self) -> None:
        """Start every rule.

        Raises:
            RewardPoolError: with what the processes wrote.
            ContractError: a function cannot be loaded or takes the wrong arguments.
        """
        try:
            for rule in (self._reward.rule, *(extra.rule for extra in self._reward.extra_rules)):
                self._runners.append(await self._started(rule))
        except BaseException:
            await self.close()
            raise

    async def _started(self, rule: str) -> RuleRunner:
        runner: RuleRunner
        if is_url(rule):
            runner = HttpRule(self._reward, rule)
        else:
            runner = pool = RewardPool(self._reward, rule)
            await pool.start()  # its process has imported a custom function first, and knows what it is
            if not pool.is_async:
                return pool
            await pool.close()
            runner = AsyncRule(self._reward, rule)
        await runner.start()
        return runner

    async def check(self, prompt: str, gold: str) -> None:
        """Try every rule on a row of the data, with an empty and a short response.

        Raises:
            RewardPoolError: names each rule that failed and what it returned or raised.
        """
        items = [Item(gold, response, False, prompt) for response in ("", f"Answer: {gold}")]
        problems = []
        for position, runner in enumerate(self._runners):
            scores = await self._ask(runner, items)
            key = "rollout.reward.rule" if position == 0 else f"rollout.reward.extra_rules[{position - 1}].rule"
            if faults := [score.error for score in scores if score.error is not None]:
                problems.append(f"{key}: {faults[0]} on a sample row (gold answer {gold[:80]!r}): {runner.last_fault}")
            elif position == 0 and (bad := [score.acc for score in scores if not 0.0 <= score.acc <= 1.0]):
                problems.append(f"{key}: {runner.rule} returned {bad[0]} on a sample row; {_RANGE}")
        if problems:
            raise RewardPoolError("; ".join(problems))

    async def score(self, gold: str, response: str, truncated: bool, prompt: str = "") -> Score:
        """Score one response on its own; see `score_group`."""
        return (await self.score_group([Item(gold, response, truncated, prompt)]))[0]

    async def score_group(self, items: Sequence[Item]) -> list[Score]:
        """Score the responses to one prompt. A bad item gives a `Score` with an error, not an exception.

        Raises:
            RewardPoolError: a rule is not running and cannot be started again.
        """
        if not self._runners:
            raise RewardPoolError("the rewards were not started, or are closed")
        by_rule = await asyncio.gather(*(self._ask(runner, items) for runner in self._runners))
        return [self._combine(scores) for scores in zip(*by_rule, strict=True)]

    @staticmethod
    async def _ask(runner: RuleRunner, items: Sequence[Item]) -> list[Score]:
        if runner.per_group:
            return await runner.score_items(items)
        return [score for (score,) in await asyncio.gather(*(runner.score_items([item]) for item in items))]

    def _combine(self, scores: Sequence[Score]) -> Score:
        for score in scores:
            if score.error is not None:
                return score
        main = scores[0]
        if not 0.0 <= main.acc <= 1.0:
            self._last_fault = f"{self._runners[0].rule} returned {main.acc}; {_RANGE}"
            return Score(0.0, None, REWARD_ERROR)
        extras = {
            _NOT_A_NAME.sub("_", runner.rule): weight * score.acc
            for runner, weight, score in zip(self._runners[1:], self._weights[1:], scores[1:], strict=True)
        }
        return Score(main.acc, main.extracted, None, extras)

    @property
    def last_fault(self) -> str:
        """The last fault in words, for an error message."""
        return self._last_fault or next((runner.last_fault for runner in self._runners if runner.last_fault), "")

    def stats(self) -> dict[str, float]:
        """Counts of all rules together, by metric name."""
        total: dict[str, float] = {}
        for runner in self._runners:
            for name, value in runner.stats().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def pids(self) -> list[int]:
        """Every process of every rule."""
        return [pid for runner in self._runners for pid in runner.pids()]

    async def close(self) -> None:
        """End every process, thread and connection. May be called twice."""
        runners, self._runners = self._runners, []
        await asyncio.gather(*(runner.close() for runner in runners))


_RANGE = "the rule that gives `acc` must stay within [0, 1] (another scale fits rollout.reward.extra_rules)"
