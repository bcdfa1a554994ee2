"""What each rank does in the conversion test: real Megatron models load converted checkpoints and save their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.integration.actor_ranks import Layout, make_config
from tests.ranks import leave_model_parallel


def load_and_save(cases: list[tuple[str, str, Layout, str | None]]) -> list[dict[str, Any]]:
    """On one rank, for each case: parameters that differ from those of the HF folder after loading the converted one.

    Args:
        cases: HF folder, Megatron checkpoint, layout, and where to save the model with Megatron, if anywhere.
    """
    from dapo_megatron.actor.process_groups import shutdown
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    outcomes = []
    for model_dir, checkpoint, layout, save_to in cases:
        try:
            outcomes.append(_one(platform, model_dir, checkpoint, layout, save_to))
        except Exception as error:
            raise RuntimeError(f"in case {Path(model_dir).name}/{layout.name}") from error
        leave_model_parallel()
    shutdown()
    return outcomes


def _one(platform: Any, model_dir: str, checkpoint: str, layout: Layout, save_to: str | None) -> dict[str, Any]:
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.utils import get_attr_wrapped_model

    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize
    from dapo_megatron.actor.weights import named_global_parameters

    world_size = int(os.environ["WORLD_SIZE"])
    config = make_config(model_dir, layout, world_size, groups=4, group_size=3)
    arch = read_architecture(model_dir)
    here = initialize(config.parallel, platform, seed=1)
    actor = Actor(config, arch, here, platform)
    offset = here.expert_offset(arch.moe.num_experts if arch.moe else 0)

    def named() -> dict[str, torch.Tensor]:
        return dict(named_global_parameters(actor.chunks, actor.mapping, offset))

    actor.load_hf(model_dir)
    expected = {name: tensor.detach().clone() for name, tensor in named().items()}
    with torch.no_grad():
        for tensor in named().values():
            tensor.fill_(7.0)
    models = [get_attr_wrapped_model(chunk, "decoder", return_model_obj=True) for chunk in actor.chunks]
    loaded = dist_checkpointing.load(
        {f"model{i}": model.sharded_state_dict() for i, model in enumerate(models)}, checkpoint
    )
    for i, model in enumerate(models):
        model.load_state_dict(loaded[f"model{i}"], strict=True)
    actual = named()
    outcome = {
        "parameters": sorted(expected),
        "different": [name for name, tensor in expected.items() if not _same(tensor, actual[name])],
    }
    if save_to is not None:
        if here.rank == 0:
            Path(save_to).mkdir(parents=True)
        torch.distributed.barrier()
        states = {f"model{i}": model.sharded_state_dict() for i, model in enumerate(models)}
        # What a training run keeps beside the model.
        states["iteration"] = 12
        dist_checkpointing.save(states, save_to)
    return outcome


def _same(expected: Any, actual: Any) -> bool:
    import torch

    return expected.dtype == actual.dtype and torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))
