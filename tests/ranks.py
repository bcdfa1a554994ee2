"""Run a function in several real processes that form a torch.distributed job, as torchrun would start them."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0, daemon: bool = True
) -> list[Any]:
    """Call `function(*args)` on every rank of a new job and return the results in rank order.

    The function is imported by the child processes, so it must be defined at module level. It joins the job by itself
    (`init_process_group`, or `dapo_megatron.actor.process_groups.initialize`).

    Args:
        daemon: the ranks end with this process; False where the function starts processes, which daemons may not.

    Raises:
        AssertionError: a rank raised (its traceback is the message), died, or did not finish in time.
    """
    context = mp.get_context("spawn")
    results: mp.Queue = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_child, args=(rank, world_size, port, function, args, results), daemon=daemon)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    collected: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(collected) < world_size:
            if results.empty():
                dead = [r for r, p in enumerate(processes) if r not in collected and p.exitcode not in (None, 0)]
                assert not dead, f"ranks {dead} died with exit codes {[processes[r].exitcode for r in dead]}"
                assert time.monotonic() < deadline, (
                    f"ranks {sorted(set(range(world_size)) - set(collected))} still run after {timeout_s} s"
                )
                time.sleep(0.02)
                continue
            rank, error, value = results.get()
            assert error is None, f"rank {rank} failed:\n{error}"
            collected[rank] = value
    finally:
        for process in processes:
            if len(collected) == world_size:
                process.join(10)
            if process.is_alive():
                process.kill()
            process.join()
    return [collected[rank] for rank in range(world_size)]


def leave_model_parallel() -> None:
    """Give up Megatron's groups, so that the rank can join another layout. Megatron forgets them, but their threads would live on."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from dapo_megatron.platform.megatron_fixes import forget_pipeline_channels

    forget_pipeline_channels()
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _child(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed test run must not leave ranks behind
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        results.put((rank, None, function(*args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise
