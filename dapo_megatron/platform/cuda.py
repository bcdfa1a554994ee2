"""CUDA devices with NCCL, and Transformer Engine's layers where it is installed."""

from __future__ import annotations

import importlib.util

import torch

from dapo_megatron.platform.base import LayerSpecFamily, MemoryStats, Platform
from dapo_megatron.platform.megatron_fixes import allow_local_latent_attention, separate_pipeline_directions

# Dense (not 2:4 sparse) bf16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets. The longest matching name wins.
_DENSE_BF16_PEAK = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H20": 148e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40": 181e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


class CudaPlatform(Platform):
    """One NVIDIA GPU per process."""

    name = "cuda"
    device_type = "cuda"
    dist_backend = "nccl"

    def __init__(self) -> None:
        has_te = importlib.util.find_spec("transformer_engine") is not None
        self.layer_spec: LayerSpecFamily = "te" if has_te else "local"
        separate_pipeline_directions()
        if not has_te:
            allow_local_latent_attention()

    def device(self, local_rank: int) -> torch.device:
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise RuntimeError(f"local rank {local_rank} has no GPU: {count} visible; lower parallel.nproc_per_node")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory_stats(self) -> MemoryStats:
        _, total = torch.cuda.mem_get_info()
        return MemoryStats(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        device_name = torch.cuda.get_device_name()
        matches = [key for key in _DENSE_BF16_PEAK if key in device_name]
        return _DENSE_BF16_PEAK[max(matches, key=len)] if matches else None

    def describe(self) -> str:
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, NCCL, {self.layer_spec} layers"
