"""Publish new weights: pause the engines, move the weights by the chosen transport, let the engines go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from dapo_megatron.actor.actor import Actor
from dapo_megatron.actor.transformer_config import TORCH_DTYPES
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.platform import Platform
from dapo_megatron.resharder.disk import DiskTransport, write_hf_folder
from dapo_megatron.resharder.distributed import DistributedTransport
from dapo_megatron.resharder.gather import NamedTensor, gather_buckets, stage_publishers
from dapo_megatron.resharder.transport import SyncReport, Transport
from dapo_megatron.service_client import ServiceClient


class Resharder:
    """Moves the actor's weights to the engines; all ranks call it together."""

    def __init__(
        self, config: RunConfig, actor: Actor, service: ServiceClient, platform: Platform, run_dir: Path
    ) -> None:
        self._config = config
        self._actor = actor
        self._service = service
        self._publishers = stage_publishers(actor.layout)
        sync = config.weight_sync
        engine_dtype = config.rollout.engine.dtype
        self._model_dtype = TORCH_DTYPES[config.model.dtype]
        dtype = self._model_dtype if engine_dtype == "auto" else getattr(torch, engine_dtype)
        buckets = partial(self._buckets, dtype)
        self._transport: Transport
        if sync.transport == "distributed":
            self._transport = DistributedTransport(
                actor.layout, buckets, backend=platform.dist_backend, timeout_s=sync.timeout_s
            )
        else:
            self._transport = DiskTransport(
                actor.layout,
                actor.mapping,
                buckets,
                self._publishers,
                folder=run_dir / "weights",
                source=Path(config.model.path),
                dtype=dtype,
                timeout_s=sync.timeout_s,
            )

    def publish(self, version: int, step: int | None) -> SyncReport:
        """Make the actor's weights the engines' version `version`; the batch of `step`, if any, counts as trained then."""
        timeout_s = self._config.weight_sync.timeout_s
        start = time.perf_counter()
        endpoints = self._service.pause_for_update(version, timeout_s)
        paused = time.perf_counter()
        report = self._transport.send(endpoints, version)
        moved = time.perf_counter()
        self._service.resume_after_update(version, step, timeout_s)
        seconds = report.seconds | {"pause": paused - start, "resume": time.perf_counter() - moved}
        return SyncReport(report.bytes, seconds)

    def export(self, target: Path) -> int:
        """Write the actor's weights as a Hugging Face folder in model.dtype; returns bytes written by rank 0."""
        return write_hf_folder(
            self._actor.mapping,
            self._buckets(self._model_dtype),
            self._actor.layout,
            self._publishers,
            target=target,
            source=Path(self._config.model.path),
            dtype=self._model_dtype,
        )

    def close(self) -> None:
        self._transport.close()

    def _buckets(self, dtype: torch.dtype) -> Iterator[list[NamedTensor]]:
        actor = self._actor
        if actor.layout.dp_rank != 0:
            return iter(())
        return gather_buckets(
            actor.chunks,
            actor.mapping,
            actor.layout,
            dtype=dtype,
            bucket_bytes=int(self._config.weight_sync.bucket_mb * 2**20),
        )
