"""`rollout.router_replay` against the model and the verbatim blocks, and the routing in the service's terms. No torch."""

from __future__ import annotations

from checkpoint_convert.architecture import ModelArchitecture
from dapo_megatron.config.passthrough import sglang_fields
from dapo_megatron.config.sections import RunConfig
from rollout_service.config import RoutingShape
from rollout_service.routed_experts import SERVER_ARGUMENT

# Megatron fields under which a token does not go where the engine sent it, and why.
_INCOMPATIBLE = {
    "moe_router_fusion": "the fused router does not replay",
    "moe_expert_capacity_factor": "a full expert drops tokens, which the engine does not",
    "moe_router_force_load_balancing": "it routes at random",
}


def routing_shape(arch: ModelArchitecture) -> RoutingShape | None:
    """The model's routed experts as the service knows them; None for a dense model."""
    if arch.moe is None:
        return None
    return RoutingShape(
        num_layers=arch.num_layers,
        moe_layers=tuple(layer for layer, routed in enumerate(arch.moe.moe_layers) if routed),
        num_experts=arch.moe.num_experts,
        top_k=arch.moe.top_k,
    )


def router_replay_problems(config: RunConfig, arch: ModelArchitecture) -> list[str]:
    """Why the engines' expert choices cannot be replayed; empty if they can, or need not be."""
    if not config.rollout.router_replay:
        return []
    if arch.moe is None:
        return [f"rollout.router_replay=true, but {arch.family} has no routed experts to choose from; set it to false"]
    problems = [
        f"megatron.{field} cannot go with rollout.router_replay=true: {reason}; remove one of them"
        for field, reason in _INCOMPATIBLE.items()
        if config.megatron.get(field)
    ]
    fields = sglang_fields() if config.rollout.engine.python is None else {}
    if fields and SERVER_ARGUMENT.strip("-").replace("-", "_") not in fields:
        problems.append(
            f"rollout.router_replay=true needs the server argument {SERVER_ARGUMENT}, which the installed SGLang does not have; "
            "install 0.5.23, or set it to false"
        )
    return problems
