"""Device buckets that another process opens through CUDA IPC, as a colocated engine does."""

from __future__ import annotations

import multiprocessing as mp

import pytest
import torch

from dapo_megatron.resharder.shared_segment import SLOTS, DeviceSlots
from rollout_service.engine import EngineEndpoint
from rollout_service.weight_loader import receive_cuda_ipc, room, views

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NAMES = ["a.weight", "b.bias"]
DTYPES = ["bfloat16", "float32"]
SHAPES = [[5, 7], [11]]


def _engine_rank(tp_rank: int, sources: list[str], asked: mp.Queue, answers: mp.Queue) -> None:
    for _ in range(2 * SLOTS):
        slot = asked.get(timeout=60)
        tensors = receive_cuda_ipc(NAMES, DTYPES, SHAPES, sources[slot], tp_rank)
        answers.put([(name, tensor.float().cpu().tolist()) for name, tensor in tensors])


def test_every_rank_of_an_engine_reads_what_is_in_the_slot_at_each_turn() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    slots = DeviceSlots(room(DTYPES, SHAPES), device)
    engine = EngineEndpoint(0, "http://127.0.0.1:1", None, 2, alive=True)
    sources = slots.sources([engine])[0]
    assert slots.sources([engine])[0] is sources  # a handle is opened once; the same engines keep theirs
    context = mp.get_context("spawn")
    asked = [context.Queue() for _ in range(2)]
    answers = [context.Queue() for _ in range(2)]
    ranks = [
        context.Process(target=_engine_rank, args=(rank, list(sources), asked[rank], answers[rank]), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        for turn in range(2 * SLOTS):
            written = views(slots.slot(turn % SLOTS), DTYPES, SHAPES)
            for tensor in written:
                tensor.copy_(torch.randn(tensor.shape, device=device))
            torch.cuda.synchronize()
            expected = [(name, tensor.float().cpu().tolist()) for name, tensor in zip(NAMES, written, strict=True)]
            for rank in range(2):
                asked[rank].put(turn % SLOTS)
                assert answers[rank].get(timeout=120) == expected
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()
        slots.close()


def test_an_engine_that_does_not_see_the_gpu_says_so() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    slots = DeviceSlots(256, device)
    (source, _) = slots.sources([EngineEndpoint(0, "http://127.0.0.1:1", None, 1, alive=True)])[0]
    visible = str(torch.cuda.get_device_properties(device).uuid)
    with pytest.raises(ValueError, match="is not among those that this engine sees"):
        receive_cuda_ipc(["x"], ["uint8"], [[4]], source.replace(visible, "nowhere"), 0)
