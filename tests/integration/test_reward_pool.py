"""The reward pool with its real processes and the real math-verify: deadlines, crashes, refills, no process left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollout_service.config import RewardSection
from rollout_service.rewards.pool import RewardPool, RewardPoolError

# math-verify compares this with a plain number for far longer than any deadline here.
HOSTILE = "\\boxed{9^{9^{9^9}}}"
ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def with_pool(use: Callable[[RewardPool], Awaitable[None]], **settings: float) -> None:
    """Run `use` with a started pool and check that no process outlives it."""
    pids: set[int] = set()

    async def main() -> None:
        pool = RewardPool(RewardSection(**{"workers": 2, "timeout_s": 20.0} | settings))
        await pool.start()
        try:
            pids.update(pool.pids())
            await use(pool)
        finally:
            pids.update(pool.pids())
            await pool.close()

    asyncio.run(main())
    assert len(pids) >= 3
    assert [pid for pid in pids if alive(pid)] == []


def test_verdicts_come_back_in_order_under_load() -> None:
    async def use(pool: RewardPool) -> None:
        scores = await asyncio.gather(
            *(
                pool.score(
                    f"\\frac{{\\pi}}{{{i % 7 + 2}}}", f"\\boxed{{\\frac{{3\\pi}}{{{3 * (i % 7 + 2 + i % 2)}}}}}", False
                )
                for i in range(300)
            )
        )
        assert [score.acc for score in scores] == [1.0 if i % 2 == 0 else 0.0 for i in range(300)]
        assert {score.error for score in scores} == {None}
        assert pool.stats()["reward/scored"] == 300

    with_pool(use)


def test_a_hostile_expression_is_killed_at_its_deadline_and_the_others_are_served() -> None:
    async def use(pool: RewardPool) -> None:
        before = set(pool.pids())
        began = time.monotonic()
        hostile = asyncio.create_task(pool.score("34", HOSTILE, False))
        await asyncio.sleep(0.1)
        others = await asyncio.gather(*(pool.score("34", f"Answer: {i}", False) for i in range(30, 40)))
        assert [score.acc for score in others] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
        assert not hostile.done()
        score = await hostile
        assert 1.5 <= time.monotonic() - began < 6.0
        assert (score.error, score.acc, score.extracted) == ("reward_timeout", 0.0, None)
        assert await eventually(lambda: pool.stats()["reward/idle_workers"] == 2)
        stats = pool.stats()
        assert (stats["reward/timeout"], stats["reward/respawned"]) == (1, 1)
        assert len(before - set(pool.pids())) == 1
        assert await eventually(lambda: sum(map(alive, before)) == 2)  # the killed one is gone
        assert (await pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False)).acc == 1.0

    with_pool(use, timeout_s=1.5)


def test_more_hostile_items_than_workers_all_end_as_timeouts() -> None:
    async def use(pool: RewardPool) -> None:
        scores = await asyncio.gather(*(pool.score("34", HOSTILE, False) for _ in range(5)))
        assert [score.error for score in scores] == ["reward_timeout"] * 5
        assert (await pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False)).acc == 1.0

    with_pool(use, timeout_s=0.7)


def test_a_killed_busy_worker_is_a_crash_and_the_pool_refills() -> None:
    async def use(pool: RewardPool) -> None:
        task = asyncio.create_task(pool.score("34", HOSTILE, False))
        await asyncio.sleep(0.3)
        (busy,) = [pid for pid in pool.pids()[1:] if cpu_ticks(pid) > 10]
        os.kill(busy, signal.SIGKILL)
        assert (await task).error == "reward_crash"
        assert await eventually(lambda: pool.stats()["reward/idle_workers"] == 1)
        assert busy not in pool.pids()
        assert (await pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False)).acc == 1.0
        assert pool.stats()["reward/crash"] == 1

    with_pool(use, workers=1)


def cpu_ticks(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    return int(fields[11]) + int(fields[12])


def test_a_worker_killed_while_idle_costs_no_sample() -> None:
    async def use(pool: RewardPool) -> None:
        for pid in pool.pids()[1:]:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        scores = await asyncio.gather(*(pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False) for _ in range(6)))
        assert [(score.acc, score.error) for score in scores] == [(1.0, None)] * 6
        assert await eventually(lambda: pool.stats()["reward/respawned"] == 2)

    with_pool(use)


def test_a_killed_zygote_is_replaced() -> None:
    async def use(pool: RewardPool) -> None:
        first = pool.pids()
        os.kill(first[0], signal.SIGKILL)
        assert await eventually(lambda: not any(map(alive, first)))  # its workers die with it
        await asyncio.sleep(0.2)
        scores = await asyncio.gather(*(pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False) for _ in range(6)))
        assert [(score.acc, score.error) for score in scores] == [(1.0, None)] * 6
        assert not set(first) & set(pool.pids())

    with_pool(use)


def test_an_exception_of_the_rule_is_an_error_not_a_wrong_answer() -> None:
    async def use(pool: RewardPool) -> None:
        score = await pool.score("   ", "Answer: 34", False)
        assert score.error == "reward_error"
        assert (await pool.score("34", "Answer: 34", False)).acc == 1.0
        assert pool.stats()["reward/error"] == 1

    with_pool(use)


def test_odd_text_crosses_the_pipe() -> None:
    async def use(pool: RewardPool) -> None:
        assert (await pool.score("34", "\ud800\x00\U0001f600" * 50_000 + "Answer: 34", False)).acc == 1.0
        assert (await pool.score("34", "so \\boxed{34}", True)).acc == 1.0
        assert (await pool.score("34", "\\boxed{34} and then", True)).acc == 0.0

    with_pool(use)


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next() -> None:
    async def use(pool: RewardPool) -> None:
        for _ in range(3):
            task = asyncio.create_task(pool.score("34", HOSTILE, False))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await pool.score("35", "Answer: 35", False)).extracted == "35"

    with_pool(use, workers=1)


def test_the_papers_rule_runs_in_the_same_pool() -> None:
    async def main() -> None:
        pool = RewardPool(RewardSection(rule="dapo_exact", workers=1))
        await pool.start()
        try:
            assert (await pool.score("34", "Answer: 3,4", False)).acc == 1.0
            assert (await pool.score("34", "Answer: 34.", False)).acc == 0.0
        finally:
            await pool.close()

    asyncio.run(main())


def test_a_memory_limit_that_is_too_small_fails_at_start_and_names_the_key() -> None:
    async def main() -> None:
        pool = RewardPool(RewardSection(workers=1, memory_limit_mb=1))
        with pytest.raises(RewardPoolError, match=r"rollout\.reward\.memory_limit_mb=1"):
            await pool.start()

    asyncio.run(main())


def test_workers_run_under_the_memory_limit() -> None:
    async def use(pool: RewardPool) -> None:
        for pid in pool.pids()[1:]:
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert f"Max address space         {777 << 20}" in limits

    with_pool(use, memory_limit_mb=777)


def test_close_ends_waiting_calls_and_busy_workers() -> None:
    async def use(pool: RewardPool) -> None:
        tasks = [asyncio.create_task(pool.score("34", HOSTILE, False)) for _ in range(4)]
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await pool.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - began < 5.0
        assert [getattr(result, "error", "closed") for result in results] == ["reward_crash"] * 2 + ["closed"] * 2
        assert isinstance(results[-1], RewardPoolError)
        with pytest.raises(RewardPoolError, match="closed"):
            await pool.score("34", "Answer: 34", False)

    with_pool(use)


# Run as a script without a __main__ guard, it counts how often it is executed, and its pool lives in a thread.
UNGUARDED_PROGRAM = f"""
import asyncio, sys, threading, time
with open(sys.argv[1], "a") as count:
    count.write("x")
from rollout_service.config import RewardSection
from rollout_service.rewards.pool import RewardPool

async def main():
    pool = RewardPool(RewardSection(workers=2, timeout_s=600.0))
    await pool.start()
    assert (await pool.score("\\\\sqrt{{12}}", "Answer: 2\\\\sqrt{{3}}", False)).acc == 1.0
    print(*pool.pids(), flush=True)
    await pool.score("34", {HOSTILE!r}, False)

thread = threading.Thread(target=lambda: asyncio.run(main()))
thread.start()
thread.join()
"""


def test_workers_end_when_their_parent_is_killed_and_never_import_its_main(tmp_path: Path) -> None:
    script, count = tmp_path / "unguarded.py", tmp_path / "count"
    script.write_text(UNGUARDED_PROGRAM)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.3)  # one worker is busy by now
        assert all(map(alive, pids))
    finally:
        parent.kill()
        parent.wait(10)
    assert asyncio.run(eventually(lambda: not any(map(alive, pids))))
    assert count.read_text() == "x"


def test_the_pool_works_on_a_uvloop_in_a_thread() -> None:
    uvloop = pytest.importorskip("uvloop")
    scores = []

    async def main() -> None:
        pool = RewardPool(RewardSection(workers=1, timeout_s=1.0))
        await pool.start()
        try:
            scores.append(await pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False))
            scores.append(await pool.score("34", HOSTILE, False))
            scores.append(await pool.score("\\sqrt{12}", "Answer: 2\\sqrt{3}", False))
        finally:
            await pool.close()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    thread.join(60)
    assert [(score.acc, score.error) for score in scores] == [(1.0, None), (0.0, "reward_timeout"), (1.0, None)]


def test_the_pool_works_inside_a_ray_actor_and_ends_with_it() -> None:
    ray = pytest.importorskip("ray")

    class Scorer:
        async def start(self) -> list[int]:
            self.pool = RewardPool(RewardSection(workers=2, timeout_s=1.0))
            await self.pool.start()
            return self.pool.pids()

        async def score(self, gold: str, response: str) -> tuple[float, str | None]:
            score = await self.pool.score(gold, response, False)
            return score.acc, score.error

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        actor = ray.remote(num_cpus=0)(Scorer).remote()
        pids = ray.get(actor.start.remote(), timeout=90)
        calls = [actor.score.remote("\\sqrt{12}", "Answer: 2\\sqrt{3}"), actor.score.remote("34", HOSTILE)]
        assert ray.get(calls, timeout=60) == [(1.0, None), (0.0, "reward_timeout")]
        assert ray.get(actor.score.remote("34", "Answer: 35"), timeout=60) == (0.0, None)
        ray.kill(actor)
        assert asyncio.run(eventually(lambda: not any(map(alive, pids))))
    finally:
        ray.shutdown()
