"""The engine's side of the transports `tensor` and `delta`; runs inside SGLang's scheduler processes.

SGLang's own update calls keep their meaning, and nothing of what comes over HTTP is unpickled. `install` registers hooks with
SGLang's plugin framework (`sglang.srt.plugins.hook_registry`, made for that), which `load_plugins` applies at the start of each
scheduler. They add three values of `load_format` to the call `/update_weights_from_distributed`, between the usual
`/begin_weight_update` and `/end_weight_update`; `names`, `dtypes` and `shapes` are the Hugging Face tensors, as always:

    dapo-shared-memory   `group_name` is `<segment>:<byte offset>`: the tensors lie there one after the other, each on a multiple
                         of `ALIGNMENT` bytes, in a file of `SHARED_MEMORY`
    dapo-cuda-ipc        the same in the memory of a GPU that this engine sees; `group_name` is a JSON list with a handle
                         for each tensor-parallel rank (`IpcHandle`)
    dapo-delta           `group_name` is a weight update group; its rank 0 broadcasts what has changed (`receive_delta`)

What fails is answered as SGLang does, with status 400 and the reason.

A delta is applied to a copy of the last version in host memory, in each tensor-parallel rank (the model's own parameters are
fused and cut, so the old tensors cannot be had from them). Whatever else writes weights makes that copy void.
"""

from __future__ import annotations

import base64
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_service.delta_codec import DeltaMismatch, Method, Words, decode, peek

logger = logging.getLogger(__name__)

SHARED_MEMORY_FORMAT = "dapo-shared-memory"
CUDA_IPC_FORMAT = "dapo-cuda-ipc"
DELTA_FORMAT = "dapo-delta"

SHARED_MEMORY = Path("/dev/shm")
SEGMENT_PREFIX = "dapo-weights-"
ALIGNMENT = 64

NamedTensors = list[tuple[str, torch.Tensor]]
# (device's UUID, memory handle, bytes, offset, reference counter's handle, its offset, event's handle, wait for the event?)
IpcHandle = tuple[str, str, int, int, str, int, str, bool]


def placed(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[tuple[torch.dtype, list[int], int, int]]:
    """Dtype, shape, first byte and bytes of tensors that lie one after the other."""
    start = 0
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype = getattr(torch, name)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        yield dtype, list(shape), start, size
        start += -(-size // ALIGNMENT) * ALIGNMENT


def room(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that tensors take up as `placed` lays them out."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for *_, size in placed(dtypes, shapes))


def views(memory: torch.Tensor, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors that share `memory`, a row of bytes, laid out as `placed` says."""
    return [memory[start : start + size].view(d).view(shape) for d, shape, start, size in placed(dtypes, shapes)]


class _Received:
    """What this process keeps between calls: mapped memory, and the last version for deltas."""

    def __init__(self) -> None:
        self.segments: dict[str, torch.Tensor] = {}
        self.devices: dict[IpcHandle, torch.Tensor] = {}
        self.base: dict[str, tuple[Words, bytes]] = {}

    def segment(self, name: str) -> torch.Tensor:
        """All bytes of a segment. Those that its owner has removed since the last call are let go."""
        self.segments = {n: m for n, m in self.segments.items() if n == name or (SHARED_MEMORY / n).exists()}
        if name not in self.segments:
            if not name.startswith(SEGMENT_PREFIX) or "/" in name:
                raise ValueError(f"{name} is not the name of a weight segment")
            # Not multiprocessing.shared_memory, whose tracker removes the segment when this process ends.
            try:
                descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR)
            except FileNotFoundError as error:
                raise ValueError(
                    f"{SHARED_MEMORY / name} is not here: weight_sync.transport=tensor needs trainer and engines on one host, "
                    "with one /dev/shm"
                ) from error
            try:
                memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            self.segments[name] = torch.frombuffer(memory, dtype=torch.uint8)
        return self.segments[name]

    def device_memory(self, handle: IpcHandle) -> torch.Tensor:
        """The memory behind a handle, which is opened once and stays open: the publishers keep their slots for the whole run."""
        if handle not in self.devices:
            self.devices[handle] = _open_ipc(handle)
        return self.devices[handle]


_received = _Received()


def receive_shared_memory(names: list[str], dtypes: list[str], shapes: list[list[int]], place: str) -> NamedTensors:
    """The tensors at `<segment>:<offset>`, without a copy: valid until this call has been answered."""
    segment, _, offset = place.rpartition(":")
    return list(zip(names, views(_received.segment(segment)[int(offset) :], dtypes, shapes), strict=True))


def receive_cuda_ipc(
    names: list[str], dtypes: list[str], shapes: list[list[int]], handles: str, tp_rank: int
) -> NamedTensors:
    """The tensors in another process's GPU memory, without a copy: valid until this call has been answered."""
    device, memory, size, offset, counter, counter_offset, event, wait = json.loads(handles)[tp_rank]
    handle: IpcHandle = (device, memory, size, offset, counter, counter_offset, event, wait)
    return list(zip(names, views(_received.device_memory(handle), dtypes, shapes), strict=True))


def _open_ipc(handle: IpcHandle) -> torch.Tensor:
    uuid, memory, size, offset, counter, counter_offset, event, wait = handle
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if uuid not in devices:
        raise ValueError(f"the publisher's GPU {uuid} is not among those that this engine sees: {sorted(devices)}")
    raw = [base64.b64decode(part) for part in (memory, counter, event)]
    storage = torch.UntypedStorage._new_shared_cuda(
        devices[uuid], raw[0], size, offset, raw[1], counter_offset, raw[2], wait
    )
    whole = torch.empty(0, dtype=torch.uint8, device=f"cuda:{devices[uuid]}")
    return whole.set_(storage, 0, (size,), (1,))


def receive_delta(
    names: list[str], dtypes: list[str], shapes: list[list[int]], group: Any, device: torch.device
) -> NamedTensors:
    """Take part in the broadcast of one bucket by rank 0 of `group`; returns the tensors that changed, on the host.

    Rank 0 sends two int64 numbers, bytes and whether this is the full bucket, then the encoded tensors in the order of `names`.
    Everybody answers with a maximum over the group: 1 from who could not apply it. Then the full bucket comes as well.

    Raises:
        DeltaMismatch: not even the full bucket is what was sent.
        RuntimeError: the group broke down.
    """
    try:
        return _receive_delta(names, dtypes, shapes, group, device)
    except (DeltaMismatch, RuntimeError):
        _forget(names)  # some may have been applied, but the model will not get them
        raise


def _receive_delta(
    names: list[str], dtypes: list[str], shapes: list[list[int]], group: Any, device: torch.device
) -> NamedTensors:
    loaded: dict[str, torch.Tensor] = {}
    while True:
        head = torch.zeros(2, dtype=torch.int64, device=device)
        torch.distributed.broadcast(head, group_src=0, group=group)
        size, full = head.tolist()
        body = torch.empty(size, dtype=torch.uint8, device=device)
        torch.distributed.broadcast(body, group_src=0, group=group)
        error = None
        try:
            loaded |= _apply(names, dtypes, shapes, memoryview(body.cpu().numpy().data))
        except DeltaMismatch as mismatch:
            error = mismatch
            logger.warning("weights in full are needed: %s", mismatch)
        lacking = torch.tensor([int(error is not None)], device=device)
        torch.distributed.all_reduce(lacking, op=torch.distributed.ReduceOp.MAX, group=group)
        if full and error is not None:
            raise error
        if full or not int(lacking):
            return list(loaded.items())


def _apply(names: list[str], dtypes: list[str], shapes: list[list[int]], body: memoryview) -> dict[str, torch.Tensor]:
    """Bring the copies of these tensors to the new version; returns those that the model does not have yet."""
    base = _received.base
    changed: dict[str, torch.Tensor] = {}
    for name, (dtype, shape, _, size) in zip(names, placed(dtypes, shapes), strict=True):
        method, used, result = peek(body)
        held = base.pop(name, None)  # whatever goes wrong, no spoilt copy stays
        words_dtype = np.dtype(f"<u{dtype.itemsize}")
        if held is not None and (held[0].dtype != words_dtype or held[0].nbytes != size):
            held = None
        if held is not None and held[1] == result and method is not Method.RAW:
            base[name] = held
        else:
            room = held[0] if held is not None else np.empty(size // dtype.itemsize, words_dtype)
            take = held[1] if held is not None else None
            try:
                decode(body, lambda wanted, r=room, t=take: r if t == wanted else None, room)  # type: ignore[misc]
            except DeltaMismatch as error:
                raise DeltaMismatch(f"{name}: {error}") from error
            base[name] = (room, result)
            changed[name] = torch.from_numpy(room.view(np.uint8)).view(dtype).view(shape)
        body = body[used:]
    return changed


def _forget(names: list[str]) -> None:
    for name in names:
        _received.base.pop(name, None)


# The hooks. SGLang calls them with the original function and its arguments.


def _receive(original: Callable[..., Any], updater: Any, **call: Any) -> Any:
    """Around `WeightUpdater.receive_weights_from_distributed`, whose errors SGLang reports as `Failed to receive weights`."""
    load_format, group_name = call.get("load_format"), call["group_name"]
    tensors = call["names"], call["dtypes"], call["shapes"]
    if load_format == SHARED_MEMORY_FORMAT:
        return receive_shared_memory(*tensors, group_name)
    if load_format == CUDA_IPC_FORMAT:
        return receive_cuda_ipc(*tensors, group_name, updater.tp_rank)
    if load_format == DELTA_FORMAT:
        groups = updater._model_update_group
        if group_name not in groups:
            raise ValueError(f"this engine is not in the weight update group {group_name}")
        return receive_delta(*tensors, groups[group_name], torch.device(updater.device))
    return original(updater, **call)


def _update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_distributed`."""
    if request.load_format != DELTA_FORMAT:
        _received.base.clear()
    reply = original(manager, request)
    if not reply.success:
        _forget(request.names)  # part of them may be in the model and part not
    if request.load_format in (SHARED_MEMORY_FORMAT, CUDA_IPC_FORMAT):
        # The publisher takes the answer, which comes from one rank, for leave to overwrite what all ranks read.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        torch.distributed.barrier(group=manager.tp_cpu_group)
    return reply


def _forget_all(*_: Any, **__: Any) -> None:
    """Before every other way in which weights are written."""
    _received.base.clear()


def install() -> None:
    """Register the hooks; to be called in every process of the server before SGLang loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{manager}.update_weights_from_distributed", _update, HookType.AROUND)
    for name in ("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"):
        HookRegistry.register(f"{manager}.{name}", _forget_all, HookType.BEFORE)
