"""Weights through a shared file system: rank 0 writes a Hugging Face folder, the engines load it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert.export import export_hf
from dapo_megatron.resharder.engine_calls import Call, EngineCalls
from dapo_megatron.resharder.gather import NamedTensor, ShardedWeights, collect_on_rank_zero
from dapo_megatron.resharder.transport import SyncReport, WeightSyncError
from rollout_service.engine import EngineEndpoint
from rollout_service.weights_client import WeightsClient


def write_hf_folder(weights: ShardedWeights, *, target: Path, source: Path, dtype: torch.dtype) -> int:
    """Write the whole model as a Hugging Face folder; all ranks call it together.

    Args:
        target: folder to create, atomically.
        source: folder with the config and tokenizer to copy.
        dtype: of the files.

    Returns:
        Bytes of tensors written by rank 0; 0 elsewhere.
    """
    tensors = collect_on_rank_zero(weights)
    written = 0
    if weights.layout.rank == 0:

        def counted() -> Iterator[NamedTensor]:
            nonlocal written
            for name, tensor in tensors:
                written += tensor.numel() * tensor.element_size()
                yield name, tensor

        export_hf(weights.mapping, counted(), target, source, dtype)
    else:
        for _ in tensors:
            pass
    dist.barrier()
    return written


class DiskTransport:
    """Writes each version to `<folder>/v<version>` and keeps only the newest."""

    def __init__(
        self, weights: ShardedWeights, *, folder: Path, source: Path, dtype: torch.dtype, timeout_s: float
    ) -> None:
        self._weights = weights
        self._folder = folder
        self._source = source
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._previous: Path | None = None

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        target = self._folder / f"v{version}"
        rank = self._weights.layout.rank
        start = time.perf_counter()
        if rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        written = write_hf_folder(self._weights, target=target, source=self._source, dtype=self._dtype)
        wrote = time.perf_counter()
        report: list[SyncReport | None] = [None]
        if rank == 0:
            lost = self._load(endpoints, target, version)
            # The service needs the folder of before until an engine holds this one.
            if self._previous is not None and self._previous != target and len(lost) < len(endpoints):
                shutil.rmtree(self._previous)
            self._previous = target
            seconds = {"gather": wrote - start, "send": time.perf_counter() - wrote}
            report = [SyncReport(self._weights.plan.bytes, written, seconds, lost)]
        dist.broadcast_object_list(report, src=0, device=self._weights.layout.device)
        (result,) = report
        assert result is not None
        if len(result.lost) == len(endpoints):
            raise WeightSyncError(f"weight update {version} reached no engine: {'; '.join(result.lost)}")
        return result

    def _load(self, endpoints: list[EngineEndpoint], target: Path, version: int) -> tuple[str, ...]:
        """Let all engines load the folder at the same time; returns those that did not."""

        def load(client: WeightsClient) -> None:
            client.update_from_disk(str(target), version)

        calls = EngineCalls(
            {e.engine_id: WeightsClient(e, 2 * self._timeout_s) for e in endpoints},
            {e.engine_id: [Call("send", f"loading {target}", load)] for e in endpoints},
            leave_groups=(),
            on_failure=lambda: None,
            timeout_s=self._timeout_s,
        )
        return tuple(calls.wait().lost.values())

    def close(self) -> None:
        """The newest version stays: a restarted engine may still load it."""
