"""The reference policy: a copy of the starting weights in host memory, swapped in for forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ReferenceWeights:
    """This rank's share of the reference policy.

    While idle it costs no device memory. Swapping goes parameter by parameter, so one parameter at a time is held
    twice on the device, and host memory holds one set of weights: the one that is not in use.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        """Copy the weights that the chunks hold now."""
        self._parameters = [param for chunk in chunks for param in chunk.parameters()]
        self._host = [_to_host(param) for param in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The chunks hold the reference weights inside the block, and exactly their own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for param, host in zip(self._parameters, self._host, strict=True):
            # In place: parameters are views into Megatron's contiguous buffers, which must keep their addresses.
            on_device = param.detach().clone()
            param.data.copy_(host)
            host.copy_(on_device)


def _to_host(param: torch.nn.Parameter) -> torch.Tensor:
    host = torch.empty_like(param, device="cpu", pin_memory=param.is_cuda, requires_grad=False)
    return host.copy_(param.detach())
