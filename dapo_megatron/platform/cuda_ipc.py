"""Handles with which another process opens GPU memory of this one."""

from __future__ import annotations

import base64

import torch

from rollout_service.weight_loader import IpcHandle


def share(memory: torch.Tensor) -> IpcHandle:
    """A handle on the whole storage of `memory`, to be opened once (`weight_loader.receive_cuda_ipc`).

    PyTorch counts every handle and frees the memory only when all of them were opened and let go, so make one for each
    receiver. The allocator must not use expandable segments, which older drivers cannot share.
    """
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    _, handle, size, offset, counter, counter_offset, event, wait = memory.untyped_storage()._share_cuda_()
    texts = [base64.b64encode(part).decode() for part in (handle, counter, event)]
    return uuid, texts[0], size, offset, texts[1], counter_offset, texts[2], wait
