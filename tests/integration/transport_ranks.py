"""What each rank does in the tests of the transports with a real engine: a Megatron actor publishes, changes, publishes again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.actor_ranks import Layout

BUCKET_MB = 0.02  # a toy model has many buckets
# Transport and what goes wrong, number of engines, and what some of them do at which of ten buckets an update (`tests.weight_receiver`).
FAULTS: list[tuple[str, int, dict[int, tuple[str, int]]]] = [
    ("tensor-dies", 3, {1: ("die", 5)}),
    ("tensor-hangs-and-refuses", 3, {0: ("hang", 3), 2: ("refuse", 14)}),
    ("delta-dies", 3, {1: ("die", 14)}),
]


def publish_cases(model: str, other: str, layout: Layout, endpoint: Any, folder: str) -> dict[str, Any]:
    """On one rank: update the engine of `endpoint` by each transport, several times, with changed weights in between.

    Args:
        other: a HF folder that the engine loads behind the transport's back.
        folder: gets a HF folder of the actor's weights for each update.

    Returns:
        By update: version, report, the engine's checksum after it (rank 0), whatever else was looked at.
    """
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize, shutdown
    from dapo_megatron.resharder.delta import DeltaTransport
    from dapo_megatron.resharder.gather import ShardedWeights
    from dapo_megatron.resharder.hf_folder import write_hf_folder
    from dapo_megatron.resharder.plan import Destination, build_plan
    from dapo_megatron.resharder.shared_memory import TensorTransport
    from dapo_megatron.resharder.shared_segment import HostSlots
    from dapo_megatron.resharder.source import source_layout
    from dapo_megatron.resharder.transport import SyncReport, WeightSyncError
    from dapo_megatron.resharder.weight_check import check_engines
    from rollout_service.weights_client import WeightsClient
    from tests.integration.actor_ranks import make_config
    from tests.weight_receiver import Receivers

    config = make_config(model, layout, int(os.environ["WORLD_SIZE"]), groups=4, group_size=2)
    here = initialize(config.parallel, platform, seed=1)
    actor = Actor(config, read_architecture(model), here, platform)
    actor.load_hf(model)
    source = source_layout(actor.chunks, actor.mapping, actor.layout, actor.expert_offset)
    plan = build_plan(actor.mapping, source, Destination(2, int(BUCKET_MB * 2**20), 8))
    weights = ShardedWeights(
        actor.chunks,
        actor.mapping,
        actor.layout,
        actor.expert_offset,
        plan,
        dtype=torch.bfloat16,
        timeout_s=30.0,
    )
    client = WeightsClient(endpoint, 30.0)
    receivers = Receivers() if here.rank == 0 else None
    results: dict[str, Any] = {"plan": (plan.publishers, len(plan.buckets), plan.bytes)}

    def change(share: float) -> None:
        """Multiply a share of all numbers by 1 + 2^-6; replicas change alike."""
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for chunk in actor.chunks:
                for parameter in chunk.parameters():
                    chosen = torch.rand(parameter.shape, generator=generator) < share
                    parameter.mul_(1 + chosen.to(parameter.dtype) / 64)

    def update(name: str, transport: Any, version: int) -> None:
        write_hf_folder(weights, target=Path(folder) / name, source=Path(model), dtype=torch.bfloat16)
        report = transport.send([endpoint], version)
        results[name] = {
            "bytes": report.bytes,
            "planned": report.planned_bytes,
            "lost": report.lost,
            "density": report.density,
            "seconds": report.seconds,
        }
        if here.rank == 0:
            results[name]["checksum"] = client.checksum()["per_engine_checksum"]
            results[name]["version"] = client.weight_version()

    def on_rank_zero(work: Callable[[], None]) -> None:
        if here.rank == 0:
            work()
        dist.barrier()

    tensor = TensorTransport(weights, synchronize=platform.synchronize, timeout_s=30.0)
    update("tensor-1", tensor, 1)
    change(0.5)
    update("tensor-2", tensor, 2)
    results["segment"] = tensor._slots.path.name if tensor._slots else None
    results["segment_was_there"] = bool(tensor._slots and tensor._slots.path.exists())
    tensor.close()

    delta = DeltaTransport(weights, backend="gloo", timeout_s=30.0)
    update("delta-first", delta, 3)
    change(0.02)
    update("delta-sparse", delta, 4)
    change(0.9)
    update("delta-dense", delta, 5)
    update("delta-same", delta, 6)
    on_rank_zero(lambda: client.update_from_disk(other, 7))
    change(0.02)
    update("delta-other-weights", delta, 8)
    change(0.02)
    stream = delta._stream
    encode, spoilt = stream._encode, []

    def spoil(names: Any, words: Any, *, full: bool) -> Any:
        """Turn one bit of the first tensor's body over."""
        encoded = encode(names, words, full=full)
        if not spoilt and not full:
            data = bytearray(encoded[0].data)
            data[-1] ^= 1
            object.__setattr__(encoded[0], "data", bytes(data))
            spoilt.append(names[0])
        return encoded

    stream._encode = spoil  # type: ignore[method-assign]
    update("delta-wrong-byte", delta, 9)
    results["spoilt"] = list(spoilt)

    def check(name: str, transport: Any, version: int) -> None:
        """Check the weights that the engine has, and keep what comes out."""
        report = SyncReport(0, 0, {})
        try:
            report = check_engines(transport, [endpoint], version, report, layout=here, timeout_s=30.0)
        except WeightSyncError as error:
            results[name] = {"error": str(error)}
        else:
            results[name] = {"lost": report.lost, "seconds": report.seconds}
        if here.rank == 0:
            results[name]["checksum"] = client.checksum()["per_engine_checksum"]
            results[name]["version"] = client.weight_version()
        dist.barrier()

    def write_one_bit() -> None:
        """Change one bit of one number of one tensor in the engine."""
        name = "model.layers.2.mlp.down_proj.weight"
        files = [load_file(path) for path in (Path(folder) / "delta-wrong-byte").glob("*.safetensors")]
        (tensor,) = (tensors[name] for tensors in files if name in tensors)
        slots = HostSlots(9, 2 * tensor.numel())
        slots.slot(0)[: tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        slots.slot(0)[100] ^= 1
        client.begin_update()
        place = slots.sources([endpoint])[endpoint.engine_id][0]
        client.receive([name], ["bfloat16"], [list(tensor.shape)], place, slots.load_format)
        client.end_update(9)
        slots.close()

    delta.forget()
    check("check-delta", delta, 9)
    delta.close()
    tensor = TensorTransport(weights, synchronize=platform.synchronize, timeout_s=30.0)
    check("check-tensor", tensor, 9)
    on_rank_zero(write_one_bit)
    check("check-one-bit", tensor, 9)
    check("check-again", tensor, 9)
    tensor.close()
    few = dataclasses.replace(plan, buckets=plan.buckets[:-1])
    partial = TensorTransport(
        ShardedWeights(
            actor.chunks,
            actor.mapping,
            actor.layout,
            actor.expert_offset,
            few,
            dtype=torch.bfloat16,
            timeout_s=30.0,
        ),
        synchronize=platform.synchronize,
        timeout_s=30.0,
    )
    check("check-missing", partial, 9)
    partial.close()

    for name, count, faults in FAULTS:
        endpoints = [receivers.start(count, faults) if receivers else []]
        dist.broadcast_object_list(endpoints, src=0)
        alive = list(endpoints[0])
        lost: list[str] = []
        weights_timeout_s = 4.0 if ("hang", 3) in faults.values() else 30.0
        transport: Any
        if name.startswith("tensor"):
            transport = TensorTransport(weights, synchronize=platform.synchronize, timeout_s=weights_timeout_s)
        else:
            transport = DeltaTransport(weights, backend="gloo", timeout_s=weights_timeout_s)
        for version in (1, 2):
            change(0.02)
            lost += transport.send(alive, version).lost
            alive = [e for e in alive if not any(e.name in reason for reason in lost)]
        write_hf_folder(weights, target=Path(folder) / name, source=Path(model), dtype=torch.bfloat16)
        if here.rank == 0:
            infos = {e.engine_id: WeightsClient(e, 10.0)._call("GET", "/model_info", None) for e in alive}
            results[name] = {"lost": lost, "engines": infos}
        dist.barrier()
        transport.close()
    if receivers is not None:
        receivers.__exit__()
    dist.barrier()
    shutdown()
    return results
