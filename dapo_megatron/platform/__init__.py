"""The device that this process runs on: CUDA with Transformer Engine, or a CPU with gloo.

`current_platform()` is called before Megatron is imported. Only this package may touch `torch.cuda`, patch a
library, or ask which device there is; everything above asks the `Platform`.
"""

from __future__ import annotations

from functools import lru_cache

from dapo_megatron.platform.base import MemoryStats, Platform


@lru_cache(maxsize=1)
def current_platform() -> Platform:
    """Return this process's platform, prepared: Megatron may be imported afterwards.

    CUDA is taken when a device is visible, else the CPU adaptor, which patches what Megatron-Core takes for
    granted about CUDA (never when a CUDA device is there).
    """
    import torch

    if torch.cuda.is_available():
        from dapo_megatron.platform.cuda import CudaPlatform

        return CudaPlatform()
    from dapo_megatron.platform.cpu import CpuPlatform

    return CpuPlatform()


__all__ = ["MemoryStats", "Platform", "current_platform"]
