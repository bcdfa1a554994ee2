"""The process group over which a publisher broadcasts weights to engines.

It lies beside the trainer's own groups: its members are one trainer rank and the tensor parallel ranks of the
engines, which are other programs and know nothing of the trainer's default group. So it is built from its own store
under its own name, as the engines do on their side (SGLang's `init_custom_process_group`); both sides prefix the
store with the group's name.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d


def create_publisher_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout: timedelta,
) -> c10d.ProcessGroup:
    """Join the weight update group `group_name` and wait until all members have come.

    The engines must be asked to join at the same time (from another thread: `WeightsClient.init_group`). Works with
    or without an initialised default group.

    Args:
        master_address, master_port: where rank 0 opens the store; a free port on an address that engines reach.
        rank: 0 for the publisher, the source of every broadcast.
        world_size: 1 + tensor parallel ranks of all engines in the group.
        group_name: fresh for each group.
        backend: `gloo` or `nccl`.
        timeout: longest wait for the members to come, and of each collective.

    Raises:
        torch.distributed.DistError: the members did not come in time, or the port is taken.
    """
    # Not `rendezvous("tcp://...")`: under torchrun that joins the agent's store instead of opening one.
    store = torch.distributed.TCPStore(
        host_name=master_address,
        port=master_port,
        world_size=world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],  # no global ranks: the members are not ranks of the default group
        c10d.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    # Lets torch.distributed functions translate ranks: here a rank of the group is its own "global" rank.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def destroy_publisher_group(group: c10d.ProcessGroup) -> None:
    """Leave the group and free its connections."""
    torch.distributed.destroy_process_group(group)
