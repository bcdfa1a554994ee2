"""Weights through a shared file system: the publishers write a Hugging Face folder together, the engines load it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dapo_megatron.resharder.engine_calls import Call, EngineCalls
from dapo_megatron.resharder.gather import ShardedWeights
from dapo_megatron.resharder.hf_folder import HFFolderExport
from dapo_megatron.resharder.transport import SyncReport, WeightSyncError
from rollout_service.engine import EngineEndpoint
from rollout_service.weights_client import WeightsClient
from rollout_service.weights_folder import remove_unless_held

logger = logging.getLogger(__name__)


class DiskTransport:
    """Writes each version to `<folder>/v<version>`; keeps the newest, and older ones only while an engine starts from them."""

    def __init__(
        self, weights: ShardedWeights, *, folder: Path, source: Path, dtype: torch.dtype, timeout_s: float
    ) -> None:
        self._weights = weights
        self._folder = folder
        # Not durable: after a crash of the machine a run goes on from its checkpoint, not from here.
        self._export = HFFolderExport(weights, source=source, dtype=dtype, durable=False)
        self._timeout_s = timeout_s
        self._written: list[Path] = []  # on rank 0: folders that are there, the newest last

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        target = self._folder / f"v{version}"
        rank = self._weights.layout.rank
        start = time.perf_counter()
        written = self._export.write(target)
        wrote = time.perf_counter()
        report: list[SyncReport | None] = [None]
        if rank == 0:
            lost = self._load(endpoints, target, version)
            # The service needs the folder of before until an engine holds this one.
            older = [folder for folder in self._written if folder != target]
            if len(lost) < len(endpoints):
                older = [folder for folder in older if not self._removed(folder)]
            self._written = [*older, target]
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

    def _removed(self, folder: Path) -> bool:
        """Remove old weights; False if that is to be tried again at the next update."""
        try:
            return remove_unless_held(folder)
        except OSError as error:  # the update itself is through
            logger.warning("old weights in %s stay there: %s", folder, error)
            return True

    def close(self) -> None:
        """The newest version stays: a restarted engine may still load it."""
