"""Weights over process groups: every publisher broadcasts its buckets to all engines (gloo or NCCL).

Each publisher has one group with all engines. An engine takes one broadcast at a time, and all engines take them in the
order of the plan, because rank 0 makes the calls (`engine_calls`). So the publishers need not agree on anything: each
gathers a bucket, starts its broadcast, which waits until the engines come to it, and gathers the next one meanwhile.

    rank 0      gather 0 | send 0 ......... | gather 2 | send 2 ...
    rank 1                 gather 1 | waits | send 1 ........ | gather 3
    engines                  take 0 ........ | take 1 ....... | take 2

An engine that fails takes its groups down. The publishers then finish gathering without sending, all ranks learn from
rank 0 which engines are left, and the update goes on with those in new groups, from the first bucket that one of them lacks.
That holds for gloo, whose broadcasts end when a connection closes. Under NCCL an engine cannot be freed from a broadcast that
another one left: the publishers abort theirs, and the engines that stay silent are lost, too, and restarted by the service.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from dapo_megatron.resharder.bucket_tensors import bucket_tensors
from dapo_megatron.resharder.engine_calls import Call, EngineCalls, Verdict
from dapo_megatron.resharder.gather import GatheredBucket, ShardedWeights
from dapo_megatron.resharder.plan import Bucket
from dapo_megatron.resharder.process_group import create_publisher_group, destroy_publisher_group, open_store
from dapo_megatron.resharder.transport import SyncReport, WeightSyncError
from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.weights_client import WeightsClient

logger = logging.getLogger(__name__)

_POLL_S = 0.0005
_LOOK_S = 0.05  # between two looks at whether rank 0 has called the attempt off


@dataclass(frozen=True)
class _Meeting:
    """Where the engines meet one publisher."""

    publisher: int
    name: str
    address: str
    port: int


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 tells all ranks after an attempt.

    Attributes:
        begun: engines to be tried again whose session is open.
        first: the turn at which the next attempt begins.
    """

    verdict: Verdict
    begun: tuple[int, ...]
    first: int
    sent_bytes: int
    seconds: dict[str, float]


class _CalledOff(Exception):
    """The attempt is over: an engine failed."""


class DistributedTransport:
    """Groups are made at the first update, and again when the engines change.

    Group names and ports are new each time, so that nothing is shared with an earlier run that crashed.
    """

    def __init__(self, weights: ShardedWeights, *, backend: str, timeout_s: float) -> None:
        self._weights = weights
        self._plan = weights.plan
        self._layout = weights.layout
        self._backend = backend
        self._timeout_s = timeout_s
        self._is_publisher = self._layout.rank in self._plan.publishers
        self._members: list[EngineEndpoint] = []
        self._meetings: list[_Meeting] = []
        self._attempts = 0
        self._left: list[str] = []  # groups of before, which the engines have not left yet
        self._stream = _Stream(self._layout.rank, backend)
        self._meeting_store: dist.TCPStore | None = None
        self._clients: dict[int, WeightsClient] = {}
        # A connection of its own: rank 0's threads write to it while other parts of the job may wait in theirs.
        self._store = c10d._get_default_store().clone()

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        if not endpoints:
            raise WeightSyncError(f"weight update {version}: the service has no engine alive to receive it")
        engines = {endpoint.engine_id: endpoint for endpoint in endpoints}
        begun: set[int] = set()
        reached: list[int] = []
        lost: dict[int, str] = {}
        seconds: dict[str, float] = {}
        sent_bytes, first = 0, 0
        pending = list(engines)
        while pending:
            outcome = self._attempt([engines[i] for i in pending], version, first, begun)
            verdict = outcome.verdict
            reached += verdict.reached
            lost |= verdict.lost
            begun.update(outcome.begun)
            pending, first = list(verdict.again), outcome.first
            sent_bytes += outcome.sent_bytes
            for phase, value in outcome.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + value
            if verdict.lost:
                self._disconnect()
                if self._layout.rank == 0:
                    logger.error("weight update %d goes on without: %s", version, "; ".join(verdict.lost.values()))
        if not reached:
            raise WeightSyncError(f"weight update {version} reached no engine: {'; '.join(lost.values())}")
        return SyncReport(self._plan.bytes, sent_bytes, seconds, tuple(lost.values()))

    def close(self) -> None:
        """Leave the groups without waiting for the engines, which may be gone already."""
        self._disconnect()

    # One attempt

    def _attempt(self, engines: list[EngineEndpoint], version: int, first: int, begun: set[int]) -> _Outcome:
        connect = engines != self._members
        if connect:
            self._meet(engines)
        # The same on all ranks and never used again, so that only this attempt can be called off under it.
        self._attempts += 1
        label = f"{self._meetings[0].name}/{self._attempts}"
        buckets = self._plan.buckets[first:]
        started = time.monotonic()
        calls = self._start_calls(engines, version, buckets, label, connect, begun) if self._layout.rank == 0 else None
        called_off = partial(self._called_off, label)
        if self._is_publisher and connect:
            self._join(engines, called_off)
        gather_s = 0.0
        for bucket in buckets:
            began = time.monotonic()
            gathered = self._weights.gather(bucket)
            gather_s += time.monotonic() - began
            if gathered is not None:
                self._stream.send(gathered, called_off)
        self._stream.finish(called_off)
        outcome = self._conclude(calls, first, started) if calls is not None else None
        concluded = f"{label}/concluded"
        self._await_rank_zero(concluded, len(buckets))
        everybody: list[tuple[float, _Outcome | None]] = [(0.0, None)] * self._layout.world_size
        dist.all_gather_object(everybody, (gather_s, outcome))
        if self._layout.rank == 0:
            self._store.delete_key(concluded)
        outcome = everybody[0][1]
        assert outcome is not None
        outcome.seconds["gather"] = max(value for value, _ in everybody)
        return outcome

    def _start_calls(
        self,
        engines: list[EngineEndpoint],
        version: int,
        buckets: tuple[Bucket, ...],
        label: str,
        connect: bool,
        begun: set[int],
    ) -> EngineCalls:
        world_size = 1 + sum(engine.tp_size for engine in engines)
        name_of = {meeting.publisher: meeting.name for meeting in self._meetings}
        receives = [
            Call(
                "send",
                f"turn {bucket.turn} of rank {bucket.publisher}",
                partial(self._receive, bucket, name_of[bucket.publisher]),
            )
            for bucket in buckets
        ]
        scripts: dict[int, list[Call]] = {}
        offset = 1
        for engine in engines:
            script: list[Call] = []
            if connect:
                script += [Call("connect", f"leaving {name}", partial(_leave_quietly, name)) for name in self._left]
                for meeting in self._meetings:
                    where = (meeting.address, meeting.port, offset, world_size, meeting.name, self._backend)
                    what = f"joining the group of rank {meeting.publisher}"
                    script.append(Call("connect", what, partial(_join_engine, where)))
            if engine.engine_id not in begun:
                script.append(Call("begin", "begin_update", WeightsClient.begin_update))
            script += [*receives, Call("end", "end_update", partial(_end_update, version))]
            scripts[engine.engine_id] = script
            offset += engine.tp_size
        return EngineCalls(
            {engine.engine_id: self._clients[engine.engine_id] for engine in engines},
            scripts,
            leave_groups=[meeting.name for meeting in self._meetings],
            on_failure=lambda: self._store.set(label, "failed"),
            timeout_s=self._timeout_s,
        )

    def _receive(self, bucket: Bucket, group_name: str, client: WeightsClient) -> None:
        client.receive(*bucket_tensors(self._weights, bucket), group_name)

    def _conclude(self, calls: EngineCalls, first: int, started: float) -> _Outcome:
        verdict = calls.wait()
        taken = {engine: progress.count("send") for engine, progress in calls.progress.items()}
        sent = self._plan.buckets[first : first + max(taken.values(), default=0)]
        return _Outcome(
            verdict=verdict,
            begun=tuple(engine for engine in verdict.again if calls.progress[engine].count("begin")),
            first=first + min((taken[engine] for engine in verdict.again), default=0),
            sent_bytes=sum(bucket.bytes for bucket in sent),
            seconds=calls.phase_seconds(started),
        )

    def _await_rank_zero(self, key: str, buckets: int) -> None:
        """Wait in the store until rank 0 is through: a long update must not exceed the time limit of a collective."""
        if self._layout.rank == 0:
            self._store.set(key, "")
            return
        limit_s = (buckets + 4) * self._timeout_s  # what rank 0 itself may take at most
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            raise WeightSyncError(
                f"rank {self._layout.rank}: rank 0 did not conclude the weight update within {limit_s:.0f} s"
            ) from error

    def _called_off(self, label: str) -> bool:
        return bool(self._store.check([label]))

    # Groups

    def _meet(self, engines: list[EngineEndpoint]) -> None:
        """Agree on new groups with these engines. Collective."""
        self._left = [meeting.name for meeting in self._meetings]
        self._disconnect()
        if self._layout.rank == 0:
            self._clients = {e.engine_id: WeightsClient(e, 2 * self._timeout_s + 60.0) for e in engines}
        mine = None
        if self._is_publisher:
            address = _reachable_address(engines)
            self._meeting_store = open_store(address, self._timeout_s)
            name = f"dapo-{self._layout.rank}-{uuid.uuid4().hex[:12]}"
            mine = _Meeting(self._layout.rank, name, address, self._meeting_store.port)
        everybody: list[_Meeting | None] = [None] * self._layout.world_size
        dist.all_gather_object(everybody, mine)
        by_rank = {meeting.publisher: meeting for meeting in everybody if meeting is not None}
        self._meetings = [by_rank[rank] for rank in self._plan.publishers]
        self._members = list(engines)

    def _join(self, engines: list[EngineEndpoint], called_off: Callable[[], bool]) -> None:
        (meeting,) = (m for m in self._meetings if m.publisher == self._layout.rank)

        def look() -> None:
            if called_off():
                raise _CalledOff

        try:
            self._stream.group = create_publisher_group(
                meeting.address,
                meeting.port,
                0,
                1 + sum(engine.tp_size for engine in engines),
                meeting.name,
                self._backend,
                timeout_s=self._timeout_s,
                abort=look,
                store=self._meeting_store,
            )
        except _CalledOff:
            return  # rank 0 tells all ranks why
        except dist.DistError as error:
            # An engine ended while it joined, or never came: its own call fails, too, and rank 0 decides.
            names = ", ".join(engine.name for engine in engines)
            logger.error("rank %d: its group with %s did not come about: %s", self._layout.rank, names, error)

    def _disconnect(self) -> None:
        self._members = []
        self._stream.leave()


class _Stream:
    """A publisher's broadcasts: one bucket is on its way while the next is being gathered.

    Attributes:
        group: the publisher's group; None on other ranks and after a broadcast has failed.
    """

    def __init__(self, rank: int, backend: str) -> None:
        self.group: dist.ProcessGroup | None = None
        self._rank = rank
        self._backend = backend
        self._turn = -1
        self._works: list[dist.Work] = []
        self._tensors: list[Tensor] = []

    def send(self, gathered: GatheredBucket, called_off: Callable[[], bool]) -> None:
        """Start to broadcast the bucket, once the one before has left; does nothing without a group."""
        self.finish(called_off)
        if self.group is None:
            return
        self._turn = gathered.bucket.turn
        self._tensors = [tensor for _, tensor in gathered.merge()]
        self._works = [dist.broadcast(t, group_src=0, group=self.group, async_op=True) for t in self._tensors]

    def finish(self, called_off: Callable[[], bool]) -> None:
        """Wait until the bucket has left. A failed broadcast makes this rank leave the group, which frees the engines in it.

        A gloo broadcast ends by itself: with an error when an engine is gone, else when the group's timeout has passed,
        which closes the connections to all engines. An NCCL broadcast is aborted when the attempt is called off.
        """
        next_look = time.monotonic() + _LOOK_S
        while not all(work.is_completed() for work in self._works):
            time.sleep(_POLL_S)
            if self._backend == "nccl" and time.monotonic() > next_look:
                if called_off():
                    logger.error("rank %d: the broadcast of turn %d was called off", self._rank, self._turn)
                    self._works, self._tensors = [], []
                    self.leave()
                    return
                next_look = time.monotonic() + _LOOK_S
        works, self._works, self._tensors = self._works, [], []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            logger.error("rank %d: the broadcast of turn %d failed: %s", self._rank, self._turn, error)
            works.clear()
            self.leave()

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            destroy_publisher_group(group)


def _join_engine(where: tuple[str, int, int, int, str, str], client: WeightsClient) -> None:
    client.init_group(*where)


def _end_update(version: int, client: WeightsClient) -> None:
    client.end_update(version)


def _leave_quietly(group_name: str, client: WeightsClient) -> None:
    """An engine that was restarted, or that failed, is not in the group any more."""
    try:
        client.destroy_group(group_name)
    except EngineError as error:
        logger.debug("%s: %s", client.endpoint.name, error)


def _reachable_address(endpoints: list[EngineEndpoint]) -> str:
    """This host's address as the engines see it: loopback when they all listen there, else the interface towards them."""
    if all(e.url.split("://")[-1].startswith(("127.", "localhost")) for e in endpoints):
        return "127.0.0.1"
    host = endpoints[0].url.split("://")[-1].split(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect((host, int(os.environ.get("MASTER_PORT", "9"))))
        return str(probe.getsockname()[0])
