"""Publish new weights: pause the engines, move the weights by the chosen transport, let the engines go on."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from dapo_megatron.actor.actor import Actor
from dapo_megatron.actor.transformer_config import TORCH_DTYPES
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.platform import Platform
from dapo_megatron.resharder.delta import DeltaTransport
from dapo_megatron.resharder.disk import DiskTransport
from dapo_megatron.resharder.distributed import DistributedTransport
from dapo_megatron.resharder.gather import ShardedWeights
from dapo_megatron.resharder.hf_folder import write_hf_folder
from dapo_megatron.resharder.plan import Destination, build_plan
from dapo_megatron.resharder.shared_memory import TensorTransport
from dapo_megatron.resharder.source import source_layout
from dapo_megatron.resharder.transport import SyncReport, Transport
from dapo_megatron.resharder.weight_check import check_engines
from dapo_megatron.service_client import ServiceClient


class Resharder:
    """Moves the actor's weights to the engines; all ranks create and call it together."""

    def __init__(
        self, config: RunConfig, actor: Actor, service: ServiceClient, platform: Platform, run_dir: Path
    ) -> None:
        self._config = config
        self._actor = actor
        self._service = service
        sync = config.weight_sync
        engine_dtype = config.rollout.engine.dtype
        self._model_dtype = TORCH_DTYPES[config.model.dtype]
        dtype = self._model_dtype if engine_dtype == "auto" else getattr(torch, engine_dtype)
        self._source = source_layout(actor.chunks, actor.mapping, actor.layout, actor.expert_offset)
        started = time.perf_counter()
        weights = self._weights(dtype)
        self._plan_s = time.perf_counter() - started
        self._check = sync.check
        self._checked = False
        self._transport: Transport
        if sync.transport == "distributed":
            self._transport = DistributedTransport(weights, backend=platform.dist_backend, timeout_s=sync.timeout_s)
        elif sync.transport == "tensor":
            self._transport = TensorTransport(weights, synchronize=platform.synchronize, timeout_s=sync.timeout_s)
        elif sync.transport == "delta":
            self._transport = DeltaTransport(weights, backend=platform.dist_backend, timeout_s=sync.timeout_s)
        else:
            self._transport = DiskTransport(
                weights,
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
        if self._check == "always" or (self._check == "first" and not self._checked):
            if isinstance(self._transport, DeltaTransport):
                self._transport.forget()
            report = check_engines(
                self._transport, endpoints, version, report, layout=self._actor.layout, timeout_s=timeout_s
            )
            self._checked = True
        moved = time.perf_counter()
        self._service.resume_after_update(version, step, timeout_s)
        now = time.perf_counter()
        report.seconds.update(plan=self._plan_s, pause=paused - start, resume=now - moved, engine_stall=now - start)
        self._plan_s = 0.0  # the plan serves all updates
        return report

    def export(self, target: Path) -> int:
        """Write the actor's weights as a Hugging Face folder in model.dtype; returns its bytes of tensors."""
        return write_hf_folder(
            self._weights(self._model_dtype),
            target=target,
            source=Path(self._config.model.path),
            dtype=self._model_dtype,
        )

    def close(self) -> None:
        self._transport.close()

    def _weights(self, dtype: torch.dtype) -> ShardedWeights:
        actor, sync = self._actor, self._config.weight_sync
        destination = Destination(
            itemsize=dtype.itemsize,
            bucket_bytes=int(sync.bucket_mb * 2**20),
            max_publishers=sync.max_publishers,
        )
        return ShardedWeights(
            actor.chunks,
            actor.mapping,
            actor.layout,
            actor.expert_offset,
            build_plan(actor.mapping, self._source, destination),
            dtype=dtype,
            timeout_s=sync.timeout_s,
        )
