"""What the trainer may ask about its device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

LayerSpecFamily = Literal["te", "local"]


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this process in bytes: `current` in use, `peak` since `reset_peak_memory`, `total` of the device."""

    current: int
    peak: int
    total: int


class Platform(ABC):
    """One device family.

    Attributes:
        name: `cuda` or `cpu`.
        device_type: argument for `torch.device`.
        dist_backend: backend of `torch.distributed`.
        layer_spec: `te` for Transformer Engine's fused layers, `local` for Megatron's own.
    """

    name: str
    device_type: str
    dist_backend: str
    layer_spec: LayerSpecFamily

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """Make `local_rank`'s device current and return it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for queued work on the device."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats: ...

    @abstractmethod
    def reset_peak_memory(self) -> None: ...

    @abstractmethod
    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense peak of one device in FLOP/s for `dtype`, or None where no honest number is known."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""
