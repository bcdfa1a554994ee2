"""The process group over which a publisher broadcasts weights to engines.

It lies beside the trainer's own groups: its members are one trainer rank and the tensor parallel ranks of the
engines, which are other programs and know nothing of the trainer's default group. So it is built from its own store
under its own name, as the engines do on their side (SGLang's `init_custom_process_group`); both sides prefix the
store with the group's name.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

_POLL_S = 0.05


def open_store(address: str, timeout_s: float) -> torch.distributed.TCPStore:
    """Open the store of a new group on a free port of `address`: `store.port`."""
    # Not `rendezvous("tcp://...")`: under torchrun that joins the agent's store instead of opening one.
    return torch.distributed.TCPStore(
        host_name=address,
        port=0,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def create_publisher_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
    abort: Callable[[], None] | None = None,
    store: torch.distributed.TCPStore | None = None,
) -> c10d.ProcessGroup:
    """Join the weight update group `group_name` and wait until all members have come.

    The engines must be asked to join at the same time (from another thread: `WeightsClient.init_group`). Works with
    or without an initialised default group.

    Args:
        master_address, master_port: where the store is, on an address that engines reach.
        rank: 0 for the publisher, the source of every broadcast.
        world_size: 1 + tensor parallel ranks of all engines in the group.
        group_name: fresh for each group.
        backend: `gloo` or `nccl`.
        timeout_s: longest wait for the members to come, and of each collective.
        abort: called while waiting; ends the wait by raising (an engine refused to join and will never come).
        store: the store, if it is open already (`open_store`); else rank 0 opens it on `master_port`.

    Raises:
        torch.distributed.DistError: the members did not come in time, or the port is taken.
        Exception: whatever `abort` raises.
    """
    timeout = timedelta(seconds=timeout_s)
    opened = store or torch.distributed.TCPStore(
        host_name=master_address,
        port=master_port,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )

    def join() -> c10d.ProcessGroup:
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],  # no global ranks: the members are not ranks of the default group
            c10d.Backend(backend),
            c10d.PrefixStore(group_name, opened),
            group_name=group_name,
            timeout=timeout,
        )
        return group

    group = join() if abort is None else _watched(join, abort)
    # Lets torch.distributed functions translate ranks: here a rank of the group is its own "global" rank.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def _watched(join: Callable[[], c10d.ProcessGroup], abort: Callable[[], None]) -> c10d.ProcessGroup:
    """Run `join` in a thread and call `abort` until it is done; a thread that is given up ends with its timeout."""
    outcome: queue.SimpleQueue[c10d.ProcessGroup | BaseException] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put(join())
        except BaseException as error:  # handed to the waiting thread, which raises it
            outcome.put(error)

    threading.Thread(target=work, name="publisher-group", daemon=True).start()
    while True:
        try:
            result = outcome.get(timeout=_POLL_S)
        except queue.Empty:
            abort()
            continue
        if isinstance(result, BaseException):
            raise result
        return result


def destroy_publisher_group(group: c10d.ProcessGroup) -> None:
    """Leave the group and free its connections."""
    torch.distributed.destroy_process_group(group)
