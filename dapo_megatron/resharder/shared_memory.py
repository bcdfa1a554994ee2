"""Weights through memory that trainer and engines share: `/dev/shm` on one host, CUDA IPC on one GPU.

Every publisher has two slots of a bucket each (`shared_segment`). It writes a bucket into one of them while the engines load
the other; an engine maps the slot and copies from there into its parameters, so a byte is written once and read once,
and passes no socket. The publishers say in the store what is ready, rank 0 then calls the engines, each in a thread of its own,
and says in the store when all of them have loaded it. The engines take the buckets in the order of the plan.

    rank 0      write 0 ............. | waits for 0 | write 2
    rank 1                write 1 ............. | waits for 1
    engines               load 0 | load 1 ........ | load 2

Nobody waits in a collective for an engine, so an engine that fails or hangs is left out, and the others just go on.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dapo_megatron.resharder.bucket_tensors import BucketTensors, bucket_tensors
from dapo_megatron.resharder.gather import ShardedWeights
from dapo_megatron.resharder.plan import Bucket
from dapo_megatron.resharder.shared_segment import SLOTS, DeviceSlots, HostSlots, Slots, clear_stale_segments
from dapo_megatron.resharder.transport import SyncReport, WeightSyncError
from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.weight_loader import room, views
from rollout_service.weights_client import WeightsClient

logger = logging.getLogger(__name__)

# Publisher -> engine id -> where the engine finds each slot.
Sources = dict[int, dict[int, tuple[str, ...]]]


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 tells all ranks: engines that were left out, with the reason; `error` is of the trainer's own side."""

    lost: dict[int, str]
    seconds: dict[str, float]
    error: str | None


class TensorTransport:
    """Every rank makes one; those that publish keep their slots until `close`."""

    def __init__(self, weights: ShardedWeights, *, synchronize: Callable[[], None], timeout_s: float) -> None:
        """
        Args:
            synchronize: waits for the device; without it another process could read what is still being written.
            timeout_s: longest wait for an engine to load one bucket.
        """
        self._weights = weights
        self._synchronize = synchronize
        self._layout = weights.layout
        self._plan = weights.plan
        self._timeout_s = timeout_s
        self._slots: Slots | None = None
        # Connections of their own: one that a thread waits in is not free for another.
        self._store, *self._thread_stores = (c10d._get_default_store().clone() for _ in range(3))
        removed = clear_stale_segments()
        if removed:
            logger.info("removed shared memory of runs that are gone: %s", ", ".join(removed))

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        if not endpoints:
            raise WeightSyncError(f"weight update {version}: the service has no engine alive to receive it")
        started = time.monotonic()
        label, sources = self._agree(endpoints)
        calls = None
        if self._layout.rank == 0:
            scripts = {
                bucket.turn: _Receive(bucket, bucket_tensors(self._weights, bucket), self._load_format())
                for bucket in self._plan.buckets
            }
            calls = _EngineThreads(endpoints, version, scripts, sources, label, self._thread_stores, self._timeout_s)
        gather_s = self._publish(label)
        outcome = calls.wait(started) if calls is not None else None
        everybody = self._conclude(label, gather_s, outcome)
        outcome = everybody[0][1]
        assert outcome is not None
        outcome.seconds["gather"] = max(seconds for seconds, _ in everybody)
        if outcome.error is not None:
            raise WeightSyncError(f"weight update {version}: {outcome.error}")
        if len(outcome.lost) == len(endpoints):
            raise WeightSyncError(f"weight update {version} reached no engine: {'; '.join(outcome.lost.values())}")
        if outcome.lost and self._layout.rank == 0:
            logger.error("weight update %d goes on without: %s", version, "; ".join(outcome.lost.values()))
        return SyncReport(self._plan.bytes, self._plan.bytes, outcome.seconds, tuple(outcome.lost.values()))

    def close(self) -> None:
        """Remove the segment."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def _load_format(self) -> str:
        return (DeviceSlots if self._layout.device.type == "cuda" else HostSlots).load_format

    def _agree(self, endpoints: list[EngineEndpoint]) -> tuple[str, Sources]:
        """A label for this update's keys in the store, and where all slots are. Collective."""
        mine = {}
        if self._layout.rank in self._plan.publishers:
            if self._slots is None:
                self._slots = self._new_slots()
            mine = self._slots.sources(endpoints)
        everybody: list[tuple[str, dict[int, tuple[str, ...]]]] = [("", {})] * self._layout.world_size
        dist.all_gather_object(everybody, (uuid.uuid4().hex, mine))
        return everybody[0][0], {rank: sources for rank, (_, sources) in enumerate(everybody) if sources}

    def _new_slots(self) -> Slots:
        own = [bucket for bucket in self._plan.buckets if bucket.publisher == self._layout.rank]
        size = max(room(*bucket_tensors(self._weights, bucket)[1:]) for bucket in own)
        if self._layout.device.type == "cuda":
            return DeviceSlots(size, self._layout.device)
        return HostSlots(self._layout.rank, size)

    def _publish(self, label: str) -> float:
        """Write this rank's buckets as the slots come free; returns seconds spent in gathering."""
        gather_s = 0.0
        written: list[int] = []
        for bucket in self._plan.buckets:
            began = time.monotonic()
            gathered = self._weights.gather(bucket)
            gather_s += time.monotonic() - began
            if gathered is None:
                continue
            assert self._slots is not None
            index = len(written) % SLOTS
            if len(written) >= SLOTS:
                self._await_taken(label, written[-SLOTS])
            tensors = [tensor for _, tensor in gathered.merge()]
            _, dtypes, shapes = bucket_tensors(self._weights, bucket)
            for target, tensor in zip(views(self._slots.slot(index), dtypes, shapes), tensors, strict=True):
                target.copy_(tensor)
            self._synchronize()
            self._store.set(f"{label}/{bucket.turn}/ready", "")
            written.append(bucket.turn)
        return gather_s

    def _await_taken(self, label: str, turn: int) -> None:
        # An engine that does not answer is given up after `timeout_s`.
        limit_s = 1.5 * self._timeout_s + 5.0
        try:
            self._store.wait([f"{label}/{turn}/taken"], timedelta(seconds=limit_s))
        except dist.DistStoreError as error:
            raise WeightSyncError(
                f"rank {self._layout.rank}: rank 0 did not say within {limit_s:.0f} s that turn {turn} was loaded"
            ) from error

    def _conclude(self, label: str, gather_s: float, outcome: _Outcome | None) -> list[tuple[float, _Outcome | None]]:
        """Everybody's gather time and rank 0's outcome. The wait is in the store: an update may exceed a collective's time limit."""
        concluded = f"{label}/concluded"
        if self._layout.rank == 0:
            self._store.set(concluded, "")
        else:
            limit_s = (len(self._plan.buckets) + 4) * self._timeout_s
            try:
                self._store.wait([concluded], timedelta(seconds=limit_s))
            except dist.DistStoreError as error:
                raise WeightSyncError(
                    f"rank {self._layout.rank}: rank 0 did not conclude the weight update within {limit_s:.0f} s"
                ) from error
        everybody: list[tuple[float, _Outcome | None]] = [(0.0, None)] * self._layout.world_size
        dist.all_gather_object(everybody, (gather_s, outcome))
        if self._layout.rank == 0:
            for bucket in self._plan.buckets:
                self._store.delete_key(f"{label}/{bucket.turn}/ready")
                self._store.delete_key(f"{label}/{bucket.turn}/taken")
            self._store.delete_key(concluded)
        return everybody


@dataclass(frozen=True)
class _Receive:
    """The call for one bucket."""

    bucket: Bucket
    tensors: BucketTensors
    load_format: str


@dataclass
class _Turn:
    """Who has loaded a bucket: `ready` once it has been written, `waiting` engines have not answered yet."""

    waiting: int
    ready: threading.Event = field(default_factory=threading.Event)


class _EngineThreads:
    """Rank 0's side of one update: a thread for each engine, and one that watches for what the publishers have written."""

    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint],
        version: int,
        receives: dict[int, _Receive],
        sources: Sources,
        label: str,
        stores: Sequence[dist.Store],
        timeout_s: float,
    ) -> None:
        self._version = version
        self._receives = receives
        self._sources = sources
        self._label = label
        self._ready_store, self._taken_store = stores
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._turns = {turn: _Turn(len(endpoints)) for turn in receives}
        self._slot_of = _slot_of_turn(receives)
        self._lost: dict[int, str] = {}
        self._error: str | None = None
        self._ended: dict[str, float] = {}
        self._threads = [
            threading.Thread(target=self._serve, args=(endpoint,), name=f"weights-{endpoint.engine_id}", daemon=True)
            for endpoint in endpoints
        ]
        self._watcher = threading.Thread(target=self._watch, name="weights-ready", daemon=True)
        for thread in (self._watcher, *self._threads):
            thread.start()

    def wait(self, started: float) -> _Outcome:
        """Wait for all threads; their calls and waits have time limits of their own."""
        for thread in (*self._threads, self._watcher):
            thread.join()
        seconds: dict[str, float] = {}
        for phase in ("begin", "send", "end"):
            if phase in self._ended:
                seconds[phase] = max(0.0, self._ended[phase] - started)
                started = max(started, self._ended[phase])
        return _Outcome(self._lost, seconds, self._error)

    def _watch(self) -> None:
        limit_s = 3 * self._timeout_s + 10.0  # a publisher may be held up by an engine and by the gather of others
        for turn, state in self._turns.items():
            try:
                self._ready_store.wait([f"{self._label}/{turn}/ready"], timedelta(seconds=limit_s))
            except dist.DistStoreError:
                publisher = self._receives[turn].bucket.publisher
                self._error = f"rank {publisher} did not write turn {turn} within {limit_s:.0f} s"
                break
            state.ready.set()
        for state in self._turns.values():
            state.ready.set()  # nobody may wait for ever; `_error` says why

    def _serve(self, endpoint: EngineEndpoint) -> None:
        client = WeightsClient(endpoint, self._timeout_s)
        done, what = 0, "begin_update"
        try:
            client.begin_update()
            self._mark("begin")
            for turn, call in self._receives.items():
                what = f"turn {turn} of rank {call.bucket.publisher}"
                self._turns[turn].ready.wait()
                if self._error is not None:
                    return
                source = self._sources[call.bucket.publisher][endpoint.engine_id][self._slot_of[turn]]
                client.receive(*call.tensors, source, call.load_format)
                self._mark("send")
                self._taken(turn)
                done += 1
            what = "end_update"
            client.end_update(self._version)
            self._mark("end")
        except EngineError as error:
            with self._lock:
                self._lost[endpoint.engine_id] = f"{what}: {error}"
        finally:
            client.close()
            for turn in list(self._turns)[done:]:
                self._taken(turn)

    def _mark(self, phase: str) -> None:
        with self._lock:
            self._ended[phase] = time.monotonic()

    def _taken(self, turn: int) -> None:
        """One engine fewer reads the slot; the last one frees it."""
        with self._lock:
            state = self._turns[turn]
            state.waiting -= 1
            if not state.waiting:
                self._taken_store.set(f"{self._label}/{turn}/taken", "")


def _slot_of_turn(receives: dict[int, _Receive]) -> dict[int, int]:
    """Which slot of its publisher each turn is in: they alternate."""
    written: dict[int, int] = {}
    slots = {}
    for turn, call in receives.items():
        publisher = call.bucket.publisher
        slots[turn] = written.get(publisher, 0) % SLOTS
        written[publisher] = written.get(publisher, 0) + 1
    return slots
