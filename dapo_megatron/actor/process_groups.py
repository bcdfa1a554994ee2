"""Process groups: `torch.distributed` plus Megatron's parallel state, started once per rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dapo_megatron.config.sections import ParallelSection
from dapo_megatron.platform import Platform
from dapo_megatron.platform.megatron_fixes import create_pipeline_channels, forget_pipeline_channels


@dataclass(frozen=True)
class Layout:
    """Where this rank stands. Ranks count tensor, context, data, then pipeline parallelism, innermost first.

    Attributes:
        rank, world_size: in the whole job.
        tp_rank, tp_size; pp_rank, pp_size; dp_rank, dp_size; cp_rank, cp_size: along each axis.
        vp_size: virtual pipeline stages (model chunks) on each rank; 1 without interleaving.
        ep_rank, ep_size: routed experts are spread over this axis, which lies inside TP x CP x DP of a stage.
        etp_rank, etp_size: tensor parallelism inside an expert.
        expert_dp_rank: which replica of its experts this rank holds.
        device: this rank's device.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    device: torch.device
    cp_rank: int = 0
    cp_size: int = 1
    vp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    expert_dp_rank: int = 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_loss(self) -> bool:
        """Ranks whose metric sums count: TP and CP rank 0 of the last stage, in each data-parallel replica."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    def expert_offset(self, num_experts: int) -> int:
        """Global number of the first of this rank's routed experts."""
        return self.ep_rank * (num_experts // self.ep_size)


def initialize(parallel: ParallelSection, platform: Platform, seed: int) -> Layout:
    """Join the job that torchrun started, unless joined already, and split it into Megatron's groups.

    Args:
        parallel: sizes; their product must match torchrun's world size.
        seed: seed of Megatron's random-number tracker.

    Raises:
        RuntimeError: not started by torchrun, or with another number of processes than the configuration says.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not set: start the trainer with torchrun, or use `dapo run`")
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != parallel.world_size:
        raise RuntimeError(
            f"torchrun started {world_size} processes, but parallel.nnodes x parallel.nproc_per_node = {parallel.world_size}; "
            "make them agree"
        )
    device = platform.device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=parallel.distributed_timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(backend=platform.dist_backend, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(parallel.distributed_timeout_s / 60)),
    )
    if parallel.pipeline_model_parallel_size > 1:
        create_pipeline_channels(parallel_state.get_pipeline_model_parallel_group(), timeout)
    model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=dist.get_rank(),
        world_size=world_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        device=device,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        vp_size=parallel.virtual_pipeline_model_parallel_size,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        expert_dp_rank=parallel_state.get_expert_data_parallel_rank(),
    )


def shutdown() -> None:
    """Leave the job; safe to call when it was never joined."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        forget_pipeline_channels()
        dist.destroy_process_group()
