"""What each rank does in the router replay tests: a real Megatron actor that is told which experts to choose."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.actor_ranks import Layout, make_config, make_ticket, whole_gradients
from tests.ranks import leave_model_parallel


def run_replay(cases: list[tuple[str, Layout, list[dict[str, Any]]]], save_to: str) -> dict[str, dict[str, Any]]:
    """On one rank: for each (model folder, layout, groups with expert choices) log-probs by sample, with replay and without.

    Results are keyed `<folder name>/<layout name>`, log-probs only on ranks that report a loss. Rank 0 writes gradients of a training
    pass with replay to `save_to/<folder name>@<layout name>.safetensors`.
    """
    from dapo_megatron.actor.process_groups import shutdown
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    results = {}
    for model_dir, layout, groups in cases:
        case = f"{Path(model_dir).name}/{layout.name}"
        try:
            results[case] = _run_case(platform, model_dir, layout, groups, f"{save_to}/{case.replace('/', '@')}")
        except Exception as error:
            raise RuntimeError(f"in case {case}") from error
        leave_model_parallel()
    shutdown()
    return results


def _mixed(actor: Any, batches: list[Any]) -> str:
    """What a training pass says whose second micro-batch has no choices."""
    batches[1] = replace(batches[1], packed=replace(batches[1].packed, routed_experts=None))
    try:
        actor.accumulate_gradients(batches)
    except ValueError as error:
        return str(error)
    return "nothing"


def _run_case(
    platform: Any, model_dir: str, layout: Layout, groups: list[dict[str, Any]], save_as: str
) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize
    from dapo_megatron.config.routing import routing_shape
    from dapo_megatron.config.validate import check_layout
    from dapo_megatron.step_batch import assemble

    config = make_config(
        model_dir,
        layout,
        int(os.environ["WORLD_SIZE"]),
        groups=len(groups),
        group_size=len(groups[0]["rewards"]),
        rollout={
            "prompts_per_step": len(groups),
            "n_samples_per_prompt": len(groups[0]["rewards"]),
            "max_response_length": 48,
            "router_replay": True,
        },
    )
    arch = read_architecture(model_dir)
    assert check_layout(config, arch) == []
    here = initialize(config.parallel, platform, seed=1)
    actor = Actor(config, arch, here, platform)
    actor.load_hf(model_dir)
    fetch = lambda refs: [groups[r]["packed"] for r in refs]  # noqa: E731
    batch = assemble(
        make_ticket(groups),
        fetch,
        config,
        dp_rank=here.dp_rank,
        dp_size=here.dp_size,
        routing=routing_shape(arch),
    )
    (micro_batches,) = batch.mini_batches
    replayed = actor.logprobs([m.packed for m in micro_batches])
    old = [pair[0] for pair in replayed] if replayed else [None] * len(micro_batches)
    gradients = whole_gradients(actor, [m.with_old_logprobs(o) for m, o in zip(micro_batches, old, strict=True)])
    if here.rank == 0:
        save_file({k: v.contiguous().clone() for k, v in gradients.items()}, f"{save_as}.safetensors")
    again = actor.logprobs([m.packed for m in micro_batches])
    own = actor.logprobs([replace(m.packed, routed_experts=None) for m in micro_batches])
    result: dict[str, Any] = {
        "micro_batches": len(micro_batches),
        "repeatable": all(torch.equal(a[0], b[0]) for a, b in zip(replayed, again, strict=True)),
        "replayed": {},
        "own": {},
    }
    if layout.pp == 1 and layout.megatron:
        result["mixed"] = _mixed(actor, [m.with_old_logprobs(o) for m, o in zip(micro_batches, old, strict=True)])
    if here.reports_loss:
        for name, outputs in (("replayed", replayed), ("own", own)):
            for micro, (logprobs, _) in zip(micro_batches, outputs, strict=True):
                for position, sample in enumerate(micro.samples):
                    result[name][sample] = logprobs[micro.packed.sample_index == position].cpu().numpy()
    return result
