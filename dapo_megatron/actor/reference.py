"""The reference policy: a copy of the starting weights in host memory, swapped in for forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dapo_megatron.actor.weights import expert_biases


class ReferenceWeights:
    """This rank's share of the reference policy.

    While idle it costs no device memory. Swapping goes parameter by parameter, so one parameter at a time is held
    twice on the device, and host memory holds one set of weights: the one that is not in use.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        """Copy the weights that the chunks hold now."""
        self._tensors: list[Tensor] = [param for chunk in chunks for param in chunk.parameters()]
        # The router's selection bias follows the load while the policy is trained; the reference keeps its own.
        self._tensors += expert_biases(chunks)
        self._host = [_to_host(tensor) for tensor in self._tensors]

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
        for tensor, host in zip(self._tensors, self._host, strict=True):
            # In place: parameters are views into Megatron's contiguous buffers, which must keep their addresses.
            on_device = tensor.detach().clone()
            tensor.data.copy_(host)
            host.copy_(on_device)


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    return host.copy_(tensor.detach())
