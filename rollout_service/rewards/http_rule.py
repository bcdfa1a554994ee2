"""A reward server: samples go out in batches over HTTP, verdicts come back.

    POST <address>    {"samples": [{"prompt", "gold", "response", "truncated"}, ...]}
    200               {"results": [{"acc": 1.0, "extracted": "34"}, ...]}        in the order of the samples

`acc` is a finite number, `extracted` text, null or absent. A result `{"error": "why"}` says that this sample has no
verdict. A batch holds what waits when a connection is free, at most `reward.http_batch_size` samples, of any groups.

Any other status or body, a closed connection and a missed deadline are faults of all samples of the batch, never
wrong answers. A connection that fails and an answer 429 or 5xx are tried again within the same deadline. Requests
ignore proxy variables of the environment.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from rollout_service.config import RewardSection
from rollout_service.rewards import REWARD_ERROR, REWARD_HTTP, REWARD_TIMEOUT, Item, RewardPoolError, Score
from rollout_service.rewards.contract import request_of

logger = logging.getLogger(__name__)

TRIES = 3
FIRST_PAUSE_S = 0.2
MAX_REPLY_BYTES = 64 << 20

_Waiting = tuple[Item, "asyncio.Future[Score]"]


class _Refused(Exception):
    """The server's answer is no verdict. `again` tells whether asking again may help."""

    def __init__(self, why: str, again: bool = False) -> None:
        super().__init__(why)
        self.again = again


class HttpRule:
    """At most `reward.concurrency` requests in flight to one address. Belongs to one event loop."""

    per_group = False

    def __init__(self, reward: RewardSection, rule: str) -> None:
        self.rule = rule
        self.last_fault = ""
        self._reward = reward
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._session: aiohttp.ClientSession | None = None
        self._senders: list[asyncio.Task[None]] = []
        self._counts = {"scored": 0, REWARD_TIMEOUT: 0, REWARD_ERROR: 0, REWARD_HTTP: 0, "http_batches": 0}
        self._busy_s = 0.0

    async def start(self) -> None:
        """Open the session. The server is first asked by the launch check."""
        connector = aiohttp.TCPConnector(limit=self._reward.concurrency)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        self._senders = [asyncio.create_task(self._send()) for _ in range(self._reward.concurrency)]

    async def score_items(self, items: Sequence[Item]) -> list[Score]:
        """Score responses, together with others that wait."""
        if self._session is None:
            raise RewardPoolError(f"the reward server {self.rule} is not connected")
        futures = [asyncio.get_running_loop().create_future() for _ in items]
        for waiting in zip(items, futures, strict=True):
            self._queue.put_nowait(waiting)
        return list(await asyncio.gather(*futures))

    def stats(self) -> dict[str, float]:
        """Counts since `start` and seconds of all requests."""
        counts = {f"reward/{name.removeprefix('reward_')}": float(n) for name, n in self._counts.items()}
        return counts | {"reward/busy_s": self._busy_s}

    def pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        """End the connections; waiting calls fail."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        session, self._session = self._session, None
        while not self._queue.empty():
            _settle(self._queue.get_nowait(), RewardPoolError(f"the reward server {self.rule} was closed"))
        if session is not None:
            await session.close()

    async def _send(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._reward.http_batch_size and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [waiting for waiting in batch if not waiting[1].done()]  # cancelled meanwhile
            if not batch:
                continue
            try:
                scores = await self._judge([item for item, _ in batch])
            except BaseException as error:  # nobody may wait for ever
                for waiting in batch:
                    _settle(waiting, RewardPoolError(f"the reward server {self.rule}: {error!r}"))
                if isinstance(error, Exception):
                    continue
                raise  # the cancellation by `close`
            for waiting, score in zip(batch, scores, strict=True):
                _settle(waiting, score)

    async def _judge(self, items: list[Item]) -> list[Score]:
        began = time.monotonic()
        self._counts["http_batches"] += 1
        try:
            async with asyncio.timeout(self._reward.timeout_s):
                scores = await self._ask_again(items)
        except TimeoutError:
            scores = self._faults(items, REWARD_TIMEOUT, f"no answer within {self._reward.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            scores = self._faults(items, REWARD_HTTP, f"{type(error).__name__}: {error}")
        except _Refused as error:
            scores = self._faults(items, REWARD_HTTP, str(error))
        finally:
            self._busy_s += time.monotonic() - began
        for score in scores:
            self._counts[score.error or "scored"] += 1
        return scores

    def _faults(self, items: list[Item], fault: str, detail: str) -> list[Score]:
        self.last_fault = f"{self.rule}: {detail}"
        logger.warning("%s: %s for a batch of %d: %s", self.rule, fault, len(items), detail)
        return [Score(0.0, None, fault)] * len(items)

    async def _ask_again(self, items: list[Item]) -> list[Score]:
        for attempt in range(1, TRIES + 1):
            try:
                return await self._ask(items)
            except (aiohttp.ClientConnectionError, _Refused) as error:
                if attempt == TRIES or isinstance(error, _Refused) and not error.again:
                    raise
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("the last try returns or raises")

    async def _ask(self, items: list[Item]) -> list[Score]:
        assert self._session is not None
        # ASCII JSON: a lone surrogate of a decoder survives the way.
        body = json.dumps({"samples": [request_of([item], per_group=False) for item in items]}).encode("ascii")
        headers = {"Content-Type": "application/json"}
        no_limit = aiohttp.ClientTimeout(total=None)  # the deadline is the caller's
        async with self._session.post(self.rule, data=body, headers=headers, timeout=no_limit) as reply:
            text = await reply.content.read(MAX_REPLY_BYTES)
            while not reply.content.at_eof() and len(text) < MAX_REPLY_BYTES:
                text += await reply.content.read(MAX_REPLY_BYTES)
            if reply.status != 200:
                raise _Refused(
                    f"status {reply.status}: {text[:200].decode('utf-8', 'replace')}",
                    again=reply.status == 429 or reply.status >= 500,
                )
        try:
            results = json.loads(text)["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise _Refused(f'no {{"results": [...]}} in {text[:200].decode("utf-8", "replace")!r}') from error
        if not isinstance(results, list) or len(results) != len(items):
            raise _Refused(f"results {str(results)[:200]} for {len(items)} samples; expected a list of one each")
        return [self._score(result) for result in results]

    def _score(self, result: Any) -> Score:
        acc = result.get("acc") if isinstance(result, dict) else None
        extracted = result.get("extracted") if isinstance(result, dict) else None
        if isinstance(result, dict) and result.get("error") is not None:
            self.last_fault = f"{self.rule}: {str(result['error'])[:300]}"
            logger.warning("%s: %s: %.300s", self.rule, REWARD_ERROR, result["error"])
            return Score(0.0, None, REWARD_ERROR)
        valid = isinstance(acc, (int, float)) and math.isfinite(acc) and isinstance(extracted, (str, type(None)))
        if not valid:
            raise _Refused(f'result {str(result)[:200]}; expected {{"acc": number, "extracted": text or null}}')
        return Score(float(acc or 0.0), extracted)


def _settle(waiting: _Waiting, result: Score | Exception) -> None:
    _, future = waiting
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
