"""Scale of the router's auxiliary losses (load balancing, z-loss), which Megatron attaches inside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


def has_auxiliary_loss(config: TransformerConfig) -> bool:
    if config.num_moe_experts is None:
        return False
    coefficients = config.moe_aux_loss_coeff
    values = coefficients if isinstance(coefficients, list) else [coefficients]
    balanced = config.moe_router_load_balancing_type not in ("none", "sinkhorn") and any(values)
    return balanced or bool(config.moe_z_loss_coeff)


@contextmanager
def mean_auxiliary_losses(config: TransformerConfig, tokens: int, device: torch.device) -> Iterator[None]:
    """Inside the block a coefficient means: times the mean over the mini-batch's micro-batches and replicas.

    With per-token losses Megatron multiplies an auxiliary loss by the tokens that this rank routes and expects the final
    division by all tokens, which the trainer leaves out because its own weights hold their denominators. So the
    coefficients are divided here; and multiplied by the ranks that share a micro-batch's tokens (TP under sequence
    parallelism, CP), which add up one loss but count only their own tokens. Collective over the data-parallel group when there is
    an auxiliary loss.

    Args:
        tokens: packed tokens of this rank's micro-batches of the mini-batch, padding included, before context and
            sequence parallelism split them.
    """
    if not has_auxiliary_loss(config):
        yield
        return
    total = torch.tensor(float(tokens), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    balance, z = config.moe_aux_loss_coeff, config.moe_z_loss_coeff
    sharing = config.tensor_model_parallel_size * config.context_parallel_size
    share = sharing / max(float(total), 1.0)
    config.moe_aux_loss_coeff = [c * share for c in balance] if isinstance(balance, list) else balance * share
    config.moe_z_loss_coeff = None if z is None else z * share
    try:
        yield
    finally:
        config.moe_aux_loss_coeff, config.moe_z_loss_coeff = balance, z
