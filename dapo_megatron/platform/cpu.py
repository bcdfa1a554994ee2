"""The CPU adaptor: lets an unmodified Megatron-Core 0.16 build, train and save models on a CPU with gloo.

Megatron-Core takes a CUDA device for granted: it asks for the current device, creates scalars with
`device="cuda"`, compares `Tensor.type()` with `"torch.cuda.FloatTensor"`, keeps CUDA random states and streams.
Each of these is answered here with its CPU meaning. The patches are process-wide, so only trainer processes
apply them, and never where a CUDA device exists.

Not covered: Transformer Engine, FP8, CUDA graphs, context parallelism.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from dapo_megatron.platform.base import LayerSpecFamily, MemoryStats, Platform
from dapo_megatron.platform.megatron_fixes import allow_local_latent_attention, separate_pipeline_directions

_CPU = torch.device("cpu")
_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
    "as_tensor",
)


class _NullStream:
    """Stands for a CUDA stream: work on a CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> _NullEvent:
        return _NullEvent()


class _NullEvent:
    """Stands for a CUDA event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    # A TorchFunctionMode would be neater, but it is off inside backward(), where activation recompute runs forward again.
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _patch_torch() -> None:
    cuda = torch.cuda
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "device_count": lambda: 1,
        "Stream": _NullStream,
        "Event": _NullEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: _NullStream(),
        "default_stream": lambda device=None: _NullStream(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "get_device_capability": lambda device=None: (0, 0),
    }
    for name, value in replacements.items():
        setattr(cuda, name, value)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]

    plain_type = torch.Tensor.type

    def cuda_type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Gradient clipping and the distributed optimizer tell float16 from float32 parameters by this string.
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, *args, **kwargs)

    torch.Tensor.type = cuda_type_name  # type: ignore[method-assign,assignment]

    plain_all_to_all = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # The token dispatcher counts with tensors; gloo wants Python ints.
        sizes = [None if s is None else [int(x) for x in s] for s in (output_split_sizes, input_split_sizes)]
        return plain_all_to_all(output, input, sizes[0], sizes[1], group=group, async_op=async_op)

    torch.distributed.all_to_all_single = all_to_all_single  # type: ignore[assignment]

    plain_to = torch.Tensor.to

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return plain_to(self, *args, **kwargs)

    torch.Tensor.to = to_cpu  # type: ignore[method-assign,assignment]


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random as tp_random

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    tp_random._get_cuda_rng_state = get_state
    tp_random._set_cuda_rng_state = set_state

    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        # Named by the router whether or not Transformer Engine is there.
        moe_utils.te_general_gemm = None


class CpuPlatform(Platform):
    """CPU processes that talk gloo. Creating it patches torch and Megatron-Core in this process."""

    name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"
    layer_spec: LayerSpecFamily = "local"

    def __init__(self) -> None:
        if torch.cuda.is_available():
            raise RuntimeError("the CPU adaptor must not be applied where a CUDA device exists")
        _patch_torch()
        with _quiet_imports():
            _patch_megatron()
            separate_pipeline_directions()
            allow_local_latent_attention()

    def device(self, local_rank: int) -> torch.device:
        return _CPU

    def synchronize(self) -> None: ...

    def memory_stats(self) -> MemoryStats:
        rss = psutil.Process(os.getpid()).memory_info().rss
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return MemoryStats(rss, peak_kib * 1024, psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None: ...  # the kernel keeps one peak per process

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None

    def describe(self) -> str:
        return f"CPU, {torch.get_num_threads()} thread(s) per process, gloo, local layers"


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Hide Megatron's import-time warnings about CUDA-only extras (Apex, Transformer Engine)."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
