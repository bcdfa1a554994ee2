"""Score responses in processes that can be killed.

A hostile expression keeps SymPy busy for minutes, and neither a thread nor `concurrent.futures` can take the time
back. Here each worker serves one request at a time, the pool keeps the deadline, and a worker that misses it is
killed and replaced by a fresh fork (see `worker` for the processes).

    pool = RewardPool(settings.rollout.reward)
    await pool.start()
    score = await pool.score("34", "so the answer is \\\\boxed{34}", truncated=False)   # Score(1.0, "34", None)
    await pool.close()

The pool belongs to one event loop, which may run in any thread, as long as that thread outlives the pool: Linux ties
the death signal of the processes to the thread that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import IO, Any

import rollout_service
from rollout_service.config import RewardSection
from rollout_service.rewards import REWARD_CRASH, REWARD_ERROR, REWARD_TIMEOUT, Item, RewardPoolError, Score
from rollout_service.rewards.contract import request_of
from rollout_service.rewards.worker import ASYNC, CANARIES, CONTROL, LENGTH, PER_GROUP, frame

logger = logging.getLogger(__name__)

__all__ = ["RewardPool", "RewardPoolError", "Score"]

START_TIMEOUT_S = 120.0  # interpreter start and imports, on a machine that is starting much else
CONTROL_TIMEOUT_S = 30.0  # a fork or a kill, and a canary in the new worker
CLOSE_TIMEOUT_S = 5.0


class _Zygote:
    """Client of the zygote process: forks and kills workers."""

    def __init__(self, reward: RewardSection, rule: str) -> None:
        self._lock = asyncio.Lock()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(_import_path()), OMP_NUM_THREADS="1")
        command = [sys.executable, "-P", "-m", "rollout_service.rewards.worker"]
        command += ["--rule", rule, "--extraction", reward.extraction, "--memory-mb", str(reward.memory_limit_mb)]
        command += ["--control-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,
            )

    async def ready(self) -> int:
        """Wait for the import of the rule; returns the flags of the message `R`."""
        return await self._reply(b"R", START_TIMEOUT_S)

    async def fork(self, sock: socket.socket) -> int:
        """Fork a worker that serves `sock`; returns its pid."""
        async with self._lock:
            self._send(CONTROL.pack(b"F", 0), [sock.fileno()])
            return await self._reply(b"F", CONTROL_TIMEOUT_S)

    async def kill(self, pid: int) -> None:
        async with self._lock:
            self._send(CONTROL.pack(b"K", pid), [])
            await self._reply(b"K", CONTROL_TIMEOUT_S)

    def _send(self, message: bytes, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [message], fds)
        except OSError as error:
            raise RewardPoolError(f"the reward zygote (pid {self.process.pid}) is gone{self._stderr_tail()}") from error

    async def _reply(self, operation: bytes, timeout_s: float) -> int:
        loop, reply = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(timeout_s):
                while len(reply) < CONTROL.size:
                    chunk = await loop.sock_recv(self._control, CONTROL.size - len(reply))
                    if not chunk:
                        raise ConnectionResetError
                    reply += chunk
        except TimeoutError as error:
            raise RewardPoolError(
                f"the reward zygote (pid {self.process.pid}) did not answer within {timeout_s:g} s{self._stderr_tail()}"
            ) from error
        except OSError as error:
            raise RewardPoolError(f"the reward zygote (pid {self.process.pid}) ended{self._stderr_tail()}") from error
        answered, value = CONTROL.unpack(reply)
        if answered != operation:
            raise RewardPoolError(f"the reward zygote answered {answered!r} to {operation!r}")
        return int(value)

    def _stderr_tail(self) -> str:
        with contextlib.suppress(ValueError):  # already closed
            self._stderr.seek(0)
            text = self._stderr.read().decode("utf-8", "replace").strip()
            return f": {text[-2000:]}" if text else ""
        return ""

    async def close(self) -> None:
        """End the zygote, which first ends its workers. Waits for it."""
        self._control.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()
                self.process.wait(CLOSE_TIMEOUT_S)
                break
            await asyncio.sleep(0.005)
        self._stderr.close()


class _Worker:
    """One worker process and the pool's end of its socket."""

    def __init__(self, pid: int, zygote: _Zygote, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.zygote = zygote
        self.served = 0
        self._reader = reader
        self._writer = writer

    @property
    def hung_up(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.served += 1
        self._writer.write(frame(request))
        await self._writer.drain()
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        reply: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        return reply

    def hang_up(self) -> None:
        self._writer.transport.abort()


class RewardPool:
    """`reward.workers` processes that apply one rule.

    Invariant: every worker is idle (in the queue), busy (held by one call) or being replaced (by a background task).
    A call either puts its worker back unharmed or starts its replacement. Calls beyond the number of workers wait.

    Args:
        rule: name or import path; None means `reward.rule`.
    """

    def __init__(self, reward: RewardSection, rule: str | None = None) -> None:
        self._reward = reward
        self.rule = rule or reward.rule
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None wakes the waiters of a broken pool
        self._zygote: _Zygote | None = None
        self._zygote_lock = asyncio.Lock()
        self._workers: dict[int, _Worker] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._closed = False
        self._counts = {"scored": 0, REWARD_TIMEOUT: 0, REWARD_CRASH: 0, REWARD_ERROR: 0, "respawned": 0, "recycled": 0}
        self._busy_s = 0.0
        self.last_fault = ""
        self._flags = 0

    async def start(self) -> None:
        """Start the processes and try the rule in each.

        Raises:
            RewardPoolError: with what the processes wrote, or which of them did not answer.
        """
        try:
            for _ in range(self._reward.workers):
                self._idle.put_nowait(await self._spawn())
        except BaseException:
            await self.close()
            raise

    @property
    def per_group(self) -> bool:
        """Whether the rule judges a whole group at once. Known after `start`."""
        return bool(self._flags & PER_GROUP)

    @property
    def is_async(self) -> bool:
        """Whether the rule is a coroutine function, which does not belong here. Known after `start`."""
        return bool(self._flags & ASYNC)

    async def score(self, gold: str, response: str, truncated: bool, prompt: str = "") -> Score:
        """Score one response; see `score_items`."""
        return (await self.score_items([Item(gold, response, truncated, prompt)]))[0]

    async def score_items(self, items: Sequence[Item]) -> list[Score]:
        """Score one response, or with a rule `per_group` the responses of a group, in one call of the rule.

        A bad item gives a `Score` with an error, not an exception. The deadline of `reward.timeout_s` counts from the
        moment a worker takes the call, not while it waits for one.

        Raises:
            RewardPoolError: the pool is closed, was never started, or cannot replace its workers.
        """
        request = request_of(items, self.per_group)
        worker = await self._take()
        began, intact, detail = time.monotonic(), False, ""
        try:
            async with asyncio.timeout(self._reward.timeout_s):
                reply = await worker.ask(request)
            if "error" in reply:
                error, detail = REWARD_ERROR, reply["error"]
            else:
                intact = True
                self._counts["scored"] += len(items)
                return [Score(acc, extracted) for acc, extracted in reply["results"]]
        except TimeoutError:
            error, detail = REWARD_TIMEOUT, f"no verdict within {self._reward.timeout_s:g} s"
        except (ConnectionError, asyncio.IncompleteReadError):
            error, detail = REWARD_CRASH, "the worker died"
        finally:
            self._busy_s += time.monotonic() - began
            worn = worker.served >= self._reward.recycle_after
            if intact and not worn and not self._closed:
                self._idle.put_nowait(worker)
            else:  # also when this call is cancelled: the worker still computes an answer that nobody reads
                self._counts["recycled"] += intact and worn
                self._replace(worker)
        self._counts[error] += len(items)
        self.last_fault = f"{self.rule}: {detail}"
        last = items[-1]
        logger.warning(
            "%s: %s: %s; gold %.80r, response ends %.120r", self.rule, error, detail, last.gold, last.response[-120:]
        )
        return [Score(0.0, None, error)] * len(items)

    def stats(self) -> dict[str, float]:
        """Counts since `start`, busy seconds of all workers, and the number of idle ones."""
        counts = {f"reward/{name.removeprefix('reward_')}": float(n) for name, n in self._counts.items()}
        return counts | {"reward/busy_s": self._busy_s, "reward/idle_workers": float(self._idle.qsize())}

    def pids(self) -> list[int]:
        """The zygote's pid, then the workers'."""
        return ([self._zygote.process.pid] if self._zygote else []) + sorted(self._workers)

    async def close(self) -> None:
        """End every process; waiting `score` calls fail. May be called twice."""
        self._closed = True
        self._fail(RewardPoolError("the reward pool is closed"))
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for worker in self._workers.values():
            worker.hang_up()
        self._workers.clear()
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.close()

    async def _take(self) -> _Worker:
        if self._failure is None and not self._workers and not self._replacing:
            raise RewardPoolError("the reward pool was not started")
        while True:
            worker = None if self._failure else await self._idle.get()
            if worker is None:
                self._idle.put_nowait(None)  # for the next waiter
                raise RewardPoolError(str(self._failure)) from self._failure
            if not worker.hung_up:
                return worker
            self._replace(worker)  # died while idle: no item is to blame

    def _replace(self, worker: _Worker) -> None:
        worker.hang_up()
        self._workers.pop(worker.pid, None)
        if not self._closed:
            self._background(self._respawn(worker))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _respawn(self, worker: _Worker) -> None:
        try:
            with contextlib.suppress(RewardPoolError):  # a dead zygote took its workers along
                await worker.zygote.kill(worker.pid)
            fresh = await self._spawn()
        except (RewardPoolError, OSError) as error:
            logger.error("a reward worker could not be replaced: %s", error)
            self._fail(error)
            return
        self._counts["respawned"] += 1
        self._idle.put_nowait(fresh)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._idle.put_nowait(None)

    async def _spawn(self) -> _Worker:
        """A fresh worker, tried with a canary; restarts the zygote if it is dead."""
        zygote = await self._living_zygote()
        ours, theirs = socket.socketpair()
        with theirs:
            pid = await zygote.fork(theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = _Worker(pid, zygote, reader, writer)
        if self.rule in CANARIES:
            await self._try(worker)
        self._workers[pid] = worker
        return worker

    async def _try(self, worker: _Worker) -> None:
        gold, response, expected = CANARIES[self.rule][0]
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                reply = await worker.ask(request_of([Item(gold, response, False)], per_group=False))
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            worker.hang_up()
            raise RewardPoolError(f"a new reward worker (pid {worker.pid}) does not answer: {error!r}") from error
        if not reply.get("results") or reply["results"][0][0] != expected:
            worker.hang_up()
            raise RewardPoolError(
                f"a new reward worker (pid {worker.pid}) answers {reply} to {response!r}, gold {gold!r}"
            )

    async def _living_zygote(self) -> _Zygote:
        async with self._zygote_lock:
            if self._zygote is not None and self._zygote.process.poll() is None:
                return self._zygote
            if self._zygote is not None:
                logger.error("the reward zygote (pid %d) died; starting another", self._zygote.process.pid)
                await self._zygote.close()
            self._zygote = _Zygote(self._reward, self.rule)
            self._flags = await self._zygote.ready()
            return self._zygote


def _import_path() -> list[str]:
    """Where the zygote finds this package, before whatever the environment says."""
    package = str(Path(rollout_service.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return [package, inherited] if inherited else [package]
