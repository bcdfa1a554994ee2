"""The trainer's layout as the transfer plan sees it, read from the ranks themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from checkpoint_convert.mapping import ParamMapping, layer_of
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.actor.weights import named_global_parameters
from dapo_megatron.resharder.plan import SourceLayout


def source_layout(
    chunks: Sequence[torch.nn.Module], mapping: Mapping[str, ParamMapping], layout: Layout, expert_offset: int
) -> SourceLayout:
    """Ask all ranks which layers they hold and where they stand; the same answer on all ranks. Collective.

    Raises:
        RuntimeError: a rank does not stand where Megatron's rank order puts it, or holds other parameters than the
            other ranks of its pipeline stage.
    """
    layers = [
        tuple(sorted({number for key, _ in tensors if (number := layer_of(key)) is not None}))
        for tensors in (named_global_parameters([chunk], mapping, expert_offset) for chunk in chunks)
    ]
    mine = (layout.tp_rank, layout.pp_rank, layout.ep_rank, layout.etp_rank, tuple(layers))
    everybody: list[tuple[int, int, int, int, tuple[tuple[int, ...], ...]]] = [(0, 0, 0, 0, ())] * layout.world_size
    dist.all_gather_object(everybody, mine)
    stage_size = layout.world_size // layout.pp_size
    source = SourceLayout(
        tp=layout.tp_size,
        cp=layout.cp_size,
        dp=layout.dp_size,
        pp=layout.pp_size,
        ep=layout.ep_size,
        etp=layout.etp_size,
        stages=tuple(everybody[stage * stage_size][4] for stage in range(layout.pp_size)),
    )
    for rank, (tp, pp, ep, etp, held) in enumerate(everybody):
        expected = (rank % source.tp, rank // stage_size, source.ep_rank(rank), rank % source.etp)
        if (tp, pp, ep, etp) != expected:
            raise RuntimeError(
                f"rank {rank} is at tensor, pipeline, expert, expert-tensor rank {(tp, pp, ep, etp)}; in Megatron's order "
                f"tp-cp-ep-dp-pp, which the transfer plan relies on, it is at {expected}"
            )
        if held != source.stages[pp]:
            raise RuntimeError(
                f"rank {rank} holds layers {held}, but rank {pp * stage_size} of its stage {source.stages[pp]}"
            )
    return source
