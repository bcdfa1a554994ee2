"""Score a file of recorded responses with the reward rules of training: the command `dapo reward`.

    in     {"gold": "34", "response": "... Answer: 34", "finish_reason": "stop", "prompt": "..."}    the last two may be absent
    out    {"acc": 1.0, "extracted": "34", "error": null}                                       one line for each line

`acc` is null where there is no verdict. A line that cannot be read has the error `bad_line` and is named by number.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rollout_service.config import RewardSection
from rollout_service.rewards import Item, Score
from rollout_service.rewards.scorer import RewardScorer
from rollout_service.sample import FinishReason

BAD_LINE = "bad_line"
# Lines in work at once, per worker or connection: enough to keep all busy while the oldest one is slow.
AHEAD = 64


class ScoreFileError(ValueError):
    """The file cannot be scored at all."""


@dataclass
class Summary:
    """What came out.

    Attributes:
        right, wrong: lines with `acc` at least, or below, 0.5.
        no_answer: wrong ones without a final answer.
        errors: lines without a verdict, by error class.
        bad_lines: the first of them, in words.
    """

    lines: int = 0
    right: int = 0
    wrong: int = 0
    no_answer: int = 0
    acc_sum: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    bad_lines: list[str] = field(default_factory=list)
    last_fault: str = ""
    seconds: float = 0.0

    MAX_NAMED = 20

    @property
    def accuracy(self) -> float | None:
        """Mean `acc` over the lines with a verdict."""
        scored = self.right + self.wrong
        return self.acc_sum / scored if scored else None

    def add(self, score: Score) -> None:
        self.lines += 1
        if score.error is not None:
            self.errors[score.error] += 1
            return
        self.acc_sum += score.acc
        self.right += score.acc >= 0.5
        self.wrong += score.acc < 0.5
        self.no_answer += score.acc < 0.5 and score.extracted is None

    def text(self) -> str:
        """A few lines for people."""
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.4f}"
        rate = self.lines / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.lines} lines in {self.seconds:.1f} s ({rate:.0f}/s): accuracy {accuracy}, {self.right} right, "
            f"{self.wrong} wrong ({self.no_answer} of them without a final answer), {self.errors.total()} without a verdict"
        ]
        lines += [f"  {name}: {count}" for name, count in sorted(self.errors.items())]
        if self.last_fault:
            lines.append(f"  last fault: {self.last_fault}")
        lines += [f"  {line}" for line in self.bad_lines]
        if (unnamed := self.errors[BAD_LINE] - len(self.bad_lines)) > 0:
            lines.append(f"  ... and {unnamed} more bad lines")
        return "\n".join(lines)


def score_file(path: Path, reward: RewardSection, out: IO[str]) -> Summary:
    """Score every line of `path` and write the verdicts to `out`, in order.

    Raises:
        ScoreFileError: the file cannot be read or is empty.
        RewardPoolError, ContractError: a rule does not start or does not keep its contract.
    """
    if not path.is_file():
        raise ScoreFileError(f"no file {path}")
    return asyncio.run(_score(path, reward, out))


async def _score(path: Path, reward: RewardSection, out: IO[str]) -> Summary:
    summary = Summary()
    scorer = RewardScorer(reward)
    pending: deque[asyncio.Task[Score]] = deque()

    async def write_oldest() -> None:
        score = await pending.popleft()
        summary.add(score)
        failed = score.error is not None
        line: dict[str, Any] = {
            "acc": None if failed else score.acc,
            "extracted": score.extracted,
            "error": score.error,
        }
        if score.extras:
            line["extras"] = dict(score.extras)
        out.write(json.dumps(line) + "\n")

    try:
        await scorer.start()
        began = time.monotonic()
        ahead = AHEAD * max(reward.workers, reward.concurrency)
        checked = False
        for item in _items(path, summary):
            if isinstance(item, Item) and not checked:
                await scorer.check(item.prompt, item.gold)
                checked = True
            work = scorer.score_group([item]) if isinstance(item, Item) else _bad_line()
            pending.append(asyncio.create_task(_only(work)))
            if len(pending) >= ahead:
                await write_oldest()
        while pending:
            await write_oldest()
        summary.seconds = time.monotonic() - began
        summary.last_fault = scorer.last_fault
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await scorer.close()
    if summary.lines == 0:
        raise ScoreFileError(f"{path} has no lines")
    return summary


async def _only(work: Any) -> Score:
    (score,) = await work
    return score


async def _bad_line() -> list[Score]:
    return [Score(0.0, None, BAD_LINE)]


def _items(path: Path, summary: Summary) -> Iterator[Item | None]:
    """The items of a file; None for a line that is none, which `summary` names. Empty lines are passed over."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                yield _item(raw)
            except ValueError as error:
                if len(summary.bad_lines) < summary.MAX_NAMED:
                    summary.bad_lines.append(f"line {number}: {error}")
                yield None


def _item(raw: bytes) -> Item:
    row = json.loads(raw.decode("utf-8"), parse_int=_NumberText, parse_float=_NumberText)
    if not isinstance(row, dict):
        raise ValueError('not an object; expected {"gold": ..., "response": ...}')
    texts = {}
    for key, default in (("gold", None), ("response", None), ("prompt", "")):
        value = row.get(key, default)
        if not isinstance(value, str) or (isinstance(value, _NumberText) and key != "gold"):
            raise ValueError(f"{key!r} is {'missing' if value is None else f'not text but {str(value)[:60]}'}")
        texts[key] = str(value)
    if not texts["gold"].strip():
        raise ValueError("'gold' is empty")
    reason = row.get("finish_reason") or FinishReason.STOP
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise ValueError(f'\'finish_reason\' is {str(reason)[:60]!r}; expected "stop" or "length"')
    return Item(texts["gold"], texts["response"], reason == FinishReason.LENGTH, texts["prompt"])


class _NumberText(str):
    """A JSON number, kept as the text that stands in the file: "012" and 5,000 digits survive."""
