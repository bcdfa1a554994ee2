"""Lets a stock SGLang serve on a machine without a GPU; unused on CUDA.

The start file (`sglang_server.py`) imports it first, where `SGLANG_USE_CPU_ENGINE` is set. All that it adds happens at module
level, because SGLang's children are spawned and import the start file again:

- the environment variables that SGLang's CPU engine needs, set before it is imported;
- a stand-in for torchvision where it is not installed: no release of it loads beside a CPU build of torch from another
  index, and SGLang imports two names of it for image models that a CPU never serves;
- a stand-in for the compiled package `sgl_kernel`, with the one function that the torch-native path really calls.
  Any other kernel raises by name when it is called;
- a stand-in for CUDA's runtime, with which `--enable-return-routed-experts` pins the host memory that holds the experts.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # a first request with penalties would compile for half a minute
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the default number of threads is many times slower in small batches

import torch


class _InterpolationMode(enum.Enum):
    """The members that SGLang's image model configurations name."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


def _install_torchvision_stand_in() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # remembers its answer: transformers must not take the stand-in for the real thing

    def module(name: str, **attributes: object) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        made.__dict__.update(attributes)
        sys.modules[name] = made
        return made

    functional = module("torchvision.transforms.functional", InterpolationMode=_InterpolationMode)
    transforms = module("torchvision.transforms", InterpolationMode=_InterpolationMode, functional=functional)
    module("torchvision", transforms=transforms)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    max_len: int,
) -> None:
    """Write each request's new cache slots into its row of the request-to-token table (in place).

    Request i owns the next `end_offset[i] - start_offset[i]` entries of `out_cache_loc`, which go to
    `req_to_token[req_pool_indices[i], start_offset[i]:end_offset[i]]`.
    """
    position = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[position : position + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        position += end - start


def _missing_kernel(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU; use other server arguments")

    return kernel


def _install_sgl_kernel_stand_in() -> None:
    if "sgl_kernel" in sys.modules:
        return
    module = types.ModuleType("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu  # type: ignore[attr-defined]
    module.__getattr__ = _missing_kernel  # type: ignore[method-assign]
    sys.modules["sgl_kernel"] = module


class _CudaRuntimeStandIn:
    """Pins nothing: without a device, pageable memory serves as well. Zero is CUDA's code for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def _install_cuda_runtime_stand_in() -> None:
    if not torch.cuda.is_available():
        torch.cuda.cudart = _CudaRuntimeStandIn


_install_torchvision_stand_in()
_install_sgl_kernel_stand_in()
_install_cuda_runtime_stand_in()
