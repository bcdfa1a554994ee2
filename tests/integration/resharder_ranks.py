"""What each rank does in the resharder's tests: a real Megatron actor whose weights are exported and published."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import time
from pathlib import Path
from typing import Any

from tests.integration.actor_ranks import Layout, make_config
from tests.ranks import leave_model_parallel
from tests.weight_receiver import Receivers, digest

# Small enough that a toy model has many buckets.
BUCKET_MB = 0.02


@dataclasses.dataclass(frozen=True)
class Case:
    """One model in one layout.

    Attributes:
        engines: receivers to publish to; 0 only exports.
        faults: by engine id, what it does at which bucket; see `tests.weight_receiver`.
        dtype: what is published.
        max_publishers: limit of sending ranks.
        shard_bytes: largest file of an export.
        blind_rank: sees another folder at the path of the export, as on a host that does not mount it.
        full_rank: cannot write more than a few kilobytes to a file.
    """

    model: str
    layout: Layout
    engines: int = 0
    faults: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"
    max_publishers: int = 64
    timeout_s: float = 60.0
    shard_bytes: int = 10**9
    blind_rank: int | None = None
    full_rank: int | None = None


def run_cases(cases: dict[str, Case], export_to: str) -> dict[str, dict[str, Any]]:
    """On one rank: build the actor of each case once per model and layout, export it, publish it twice."""
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    from dapo_megatron.actor.process_groups import shutdown

    results = {}
    actor, built = None, None
    receivers = Receivers() if os.environ["RANK"] == "0" else None
    for name, case in cases.items():
        if built != (case.model, case.layout):
            if built is not None:
                leave_model_parallel()
            actor, built = _build(platform, case), (case.model, case.layout)
        try:
            results[name] = _run(actor, case, receivers, Path(export_to) / name / "model")
        except Exception as error:
            raise RuntimeError(f"in case {name}") from error
    shutdown()
    if receivers is not None:
        receivers.__exit__()
    return results


def _build(platform: Any, case: Case) -> Any:
    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize

    world_size = int(os.environ["WORLD_SIZE"])
    config = make_config(case.model, case.layout, world_size, groups=4, group_size=2)
    here = initialize(config.parallel, platform, seed=1)
    actor = Actor(config, read_architecture(case.model), here, platform)
    actor.load_hf(case.model)
    return actor


def _run(actor: Any, case: Case, receivers: Receivers | None, target: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from dapo_megatron.resharder.distributed import DistributedTransport
    from dapo_megatron.resharder.gather import ShardedWeights
    from dapo_megatron.resharder.plan import Destination, build_plan
    from dapo_megatron.resharder.source import source_layout
    from dapo_megatron.resharder.transport import WeightSyncError
    from rollout_service.weights_client import WeightsClient

    dtype = getattr(torch, case.dtype)
    source = source_layout(actor.chunks, actor.mapping, actor.layout, actor.expert_offset)
    destination = Destination(dtype.itemsize, int(BUCKET_MB * 2**20), case.max_publishers)
    plan = build_plan(actor.mapping, source, destination)
    weights = ShardedWeights(
        actor.chunks, actor.mapping, actor.layout, actor.expert_offset, plan, dtype=dtype, timeout_s=case.timeout_s
    )
    result: dict[str, Any] = {"publishers": plan.publishers, "buckets": len(plan.buckets), "plan_bytes": plan.bytes}
    if not case.engines:
        return result | _export(weights, case, dtype, target)
    endpoints = [receivers.start(case.engines, case.faults) if receivers else []]
    dist.broadcast_object_list(endpoints, src=0)
    transport = DistributedTransport(weights, backend="gloo", timeout_s=case.timeout_s)
    result["reports"], alive = [], endpoints[0]
    for version in (1, 2):
        began = time.perf_counter()
        try:
            report = transport.send(alive, version)
        except WeightSyncError as error:
            result["error"] = str(error)
            break
        result["reports"].append(dataclasses.asdict(report) | {"wall_s": time.perf_counter() - began})
        alive = [e for e in alive if not any(e.name in reason for reason in report.lost)]
    if receivers is not None and "error" not in result:
        infos = [WeightsClient(e, 10.0)._call("GET", "/model_info", None) for e in alive]
        result["engines"] = dict(zip((e.engine_id for e in alive), infos, strict=True))
    dist.barrier()
    transport.close()
    return result


def _export(weights: Any, case: Case, dtype: Any, target: Path) -> dict[str, Any]:
    """Write the folder twice, as two updates do."""
    from dapo_megatron.resharder.hf_folder import HFFolderExport
    from dapo_megatron.resharder.transport import WeightSyncError

    rank = weights.layout.rank
    if rank == case.blind_rank:
        target = target.parent / "elsewhere" / "model"
        (target.parent / ".model.incomplete").mkdir(parents=True)
    export = HFFolderExport(
        weights, source=Path(case.model), dtype=dtype, durable=True, max_shard_bytes=case.shard_bytes
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dapo_megatron.resharder.hf_folder")
    logger.addHandler(handler)
    try:
        if rank == case.full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
        written = [export.write(target) for _ in range(2)]
    except WeightSyncError as error:
        return {"error": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logger.removeHandler(handler)
    return {"written": written, "lines": lines}


def file_digests(
    folder: Path | str, dtype: str = "float32", float32: str = "e_score_correction_bias"
) -> dict[str, str]:
    """Digest of every tensor of a HF folder, cast to `dtype` except where the name ends with `float32`."""
    import torch

    from checkpoint_convert.hf import HFReader

    with HFReader(folder) as reader:
        return {
            name: digest(
                reader.tensor(name) if name.endswith(float32) else reader.tensor(name).to(getattr(torch, dtype))
            )
            for name in reader.names
        }
