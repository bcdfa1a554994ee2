"""A sharded Megatron model's weights or gradients as Hugging Face tensors, gathered by object for small test models.

Independent of the resharder on purpose: shards of all ranks meet on rank 0, replicas are compared with each other, and
the mapping puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def merged(actor: Any, value: Callable[[Tensor], Tensor], atol: float = 0.0) -> dict[str, Tensor]:
    """On rank 0 `value` of every parameter by HF name, elsewhere nothing. Collective.

    Args:
        atol: replicas of a shard may differ by this much.
    """
    from dapo_megatron.actor.weights import named_global_parameters

    here = actor.layout
    mine = {}
    for key, tensor in named_global_parameters(actor.chunks, actor.mapping, actor.expert_offset):
        rank = here.etp_rank if actor.mapping[key].expert is not None else here.tp_rank
        mine[key, rank] = value(tensor).detach().clone()
    gathered: list[Any] | None = [None] * here.world_size if here.rank == 0 else None
    dist.gather_object(mine, gathered)
    if gathered is None:
        return {}
    shards: dict[tuple[str, int], Tensor] = {}
    for part in gathered:
        for where, tensor in part.items():
            if where in shards:
                torch.testing.assert_close(tensor, shards[where], rtol=0, atol=atol, msg=lambda m, w=where: f"{w}: {m}")
            shards[where] = tensor
    result: dict[str, Tensor] = {}
    for key, entry in actor.mapping.items():
        if entry.tied_copy:
            continue
        size = here.etp_size if entry.expert is not None else here.tp_size
        result |= dict(entry.merge([shards[key, rank] for rank in range(size)]))
    return result
