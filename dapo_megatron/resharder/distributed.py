"""Weights over a process group: each pipeline stage's publisher broadcasts its tensors to all engines (gloo or NCCL)."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch.distributed as dist

from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.resharder.gather import NamedTensor
from dapo_megatron.resharder.process_group import create_publisher_group, destroy_publisher_group
from dapo_megatron.resharder.transport import SyncReport, WeightSyncError
from rollout_service.engine import EngineEndpoint
from rollout_service.weights_client import WeightsClient

logger = logging.getLogger(__name__)

_POLL_S = 0.0005


class DistributedTransport:
    """One group per publisher and set of engines; made at the first update and again when the engines change.

    Group names and ports are new each time, so that nothing is shared with an earlier run that crashed.
    """

    def __init__(
        self, layout: Layout, buckets: Callable[[], Iterator[list[NamedTensor]]], *, backend: str, timeout_s: float
    ) -> None:
        self._layout = layout
        self._buckets = buckets
        self._backend = backend
        self._timeout_s = timeout_s
        self._endpoints: list[EngineEndpoint] = []
        self._clients: list[WeightsClient] = []
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._pool = ThreadPoolExecutor(thread_name_prefix="weight-sync")

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        if not endpoints:
            raise WeightSyncError(f"weight update {version}: the service has no engine alive to receive it")
        seconds: dict[str, float] = {}
        with _timed(seconds, "connect"):
            if endpoints != self._endpoints:
                self._connect(endpoints)
        with _timed(seconds, "begin"):
            if self._layout.rank == 0:
                self._on_all("begin_update", lambda client: client.begin_update())
            dist.barrier()
        sent = 0
        with _timed(seconds, "transfer"):
            # Stages send in turn: an engine takes one broadcast at a time.
            for stage in range(self._layout.pp_size):
                if self._layout.pp_rank == stage and self._layout.dp_rank == 0:
                    for bucket in self._buckets():
                        if self._layout.is_publisher:
                            sent += self._broadcast(bucket)
                dist.barrier()
        with _timed(seconds, "end"):
            if self._layout.rank == 0:
                self._on_all("end_update", lambda client: client.end_update(version))
            dist.barrier()
        return SyncReport(bytes=sent, seconds=seconds)

    def close(self) -> None:
        """Leave the group without waiting for the engines, which may be gone already."""
        if self._group is not None:
            destroy_publisher_group(self._group)
            self._group = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _connect(self, endpoints: list[EngineEndpoint]) -> None:
        old_clients, old_name = self._clients, self._group_name
        if self._layout.is_publisher or self._layout.rank == 0:
            self._clients = [WeightsClient(endpoint, self._timeout_s) for endpoint in endpoints]
        if self._layout.is_publisher:
            if self._group is not None:
                destroy_publisher_group(self._group)
                self._group = None
                for client in old_clients:
                    if any(client.endpoint == e for e in endpoints):
                        client.destroy_group(old_name)
            self._join(endpoints)
        self._endpoints = list(endpoints)
        dist.barrier()

    def _join(self, endpoints: list[EngineEndpoint]) -> None:
        address = _reachable_address(endpoints)
        port = _free_port(address)
        self._group_name = f"dapo-stage{self._layout.pp_rank}-{uuid.uuid4().hex[:12]}"
        world_size = 1 + sum(e.tp_size for e in endpoints)
        joins = []
        offset = 1
        for client, endpoint in zip(self._clients, endpoints, strict=True):
            joins.append(
                self._pool.submit(client.init_group, address, port, offset, world_size, self._group_name, self._backend)
            )
            offset += endpoint.tp_size
        self._group = create_publisher_group(
            address,
            port,
            0,
            world_size,
            self._group_name,
            self._backend,
            timeout_s=self._timeout_s,
            abort=lambda: _raise_failed(joins),
        )
        self._wait(joins, "init_weights_update_group")

    def _broadcast(self, bucket: list[NamedTensor]) -> int:
        assert self._group is not None
        names = [name for name, _ in bucket]
        dtypes = [str(t.dtype).removeprefix("torch.") for _, t in bucket]
        shapes = [list(t.shape) for _, t in bucket]
        tensors = [t.contiguous() for _, t in bucket]
        receives = [
            self._pool.submit(client.receive, names, dtypes, shapes, self._group_name) for client in self._clients
        ]
        works = [dist.broadcast(t, group_src=0, group=self._group, async_op=True) for t in tensors]
        deadline = time.monotonic() + self._timeout_s
        for name, work in zip(names, works, strict=True):
            while not work.is_completed():
                # An engine that refuses the request never joins the broadcast: its reply is the only sign.
                _raise_failed(receives)
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"rank {self._layout.rank}: broadcast of {name} did not finish in {self._timeout_s:.0f} s; "
                        f"engines still silent: {self._silent(receives)}"
                    )
                time.sleep(_POLL_S)
            work.wait()
        self._wait(receives, "update_weights_from_distributed")
        return sum(t.numel() * t.element_size() for t in tensors)

    def _on_all(self, phase: str, call: Callable[[WeightsClient], None]) -> None:
        self._wait([self._pool.submit(call, client) for client in self._clients], phase)

    def _wait(self, futures: list[Future[None]], phase: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        for future in futures:
            try:
                future.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise WeightSyncError(
                    f"rank {self._layout.rank}: {phase} got no answer within {self._timeout_s:.0f} s from {self._silent(futures)}"
                ) from error

    def _silent(self, futures: list[Future[None]]) -> str:
        return ", ".join(
            f"engine {e.engine_id} ({e.url})"
            for e, f in zip(self._endpoints or [c.endpoint for c in self._clients], futures, strict=False)
            if not f.done()
        )


def _raise_failed(futures: list[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


def _reachable_address(endpoints: list[EngineEndpoint]) -> str:
    """This host's address as the engines see it: loopback when they all listen there, else MASTER_ADDR's interface."""
    if all(e.url.split("://")[-1].startswith(("127.", "localhost")) for e in endpoints):
        return "127.0.0.1"
    host = next(e.url for e in endpoints).split("://")[-1].split(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((host, int(os.environ.get("MASTER_PORT", "9"))))
        return str(probe.getsockname()[0])


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind((address, 0))
        return int(s.getsockname()[1])


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
