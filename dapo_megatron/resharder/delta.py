"""Only what has changed: the publishers broadcast each bucket against the version that the engines acknowledged last.

The transport is `distributed` with other contents: the same groups, calls, turns and the same way of going on without an engine
that fails. It reaches engines on other hosts, because the bytes travel in the group. A publisher keeps, in host memory, the
tensors of its own buckets as the engines have them, in the engines' dtype; so does each engine (`rollout_service.weight_loader`).

    publisher   [bytes, full?] and the encoded tensors (`delta_codec`)  ->  engines apply, check every tensor, load what changed
    everybody   maximum over the group: 1 from who could not apply it
    publisher   on 1: the bucket in full, to all

So an engine that was restarted, that loaded other weights meanwhile, or to which a wrong byte came, gets the bucket in full within
the same call. Base and result are named by their checksums, so applying a bucket twice, or after a failed attempt, is harmless.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dapo_megatron.resharder.bucket_tensors import bucket_tensors
from dapo_megatron.resharder.distributed import DistributedTransport, _Stream
from dapo_megatron.resharder.gather import GatheredBucket, ShardedWeights
from dapo_megatron.resharder.plan import Bucket
from dapo_megatron.resharder.transport import SyncReport
from rollout_service.delta_codec import NO_BASE, Encoded, Words, encode
from rollout_service.engine import EngineEndpoint
from rollout_service.weight_loader import DELTA_FORMAT
from rollout_service.weights_client import WeightsClient

_MAX_THREADS = 8


class DeltaTransport(DistributedTransport):
    """See the module. Host memory: the model once over all publishers, and once in each tensor-parallel rank of an engine."""

    _stream: _DeltaStream

    def __init__(self, weights: ShardedWeights, *, backend: str, timeout_s: float) -> None:
        super().__init__(weights, backend=backend, timeout_s=timeout_s)
        self._stream = _DeltaStream(weights.layout.rank, backend, weights.layout.device)

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        self._stream.traffic = Traffic()
        report = super().send(endpoints, version)
        everybody = [Traffic()] * self._layout.world_size
        dist.all_gather_object(everybody, self._stream.traffic)
        words = sum(traffic.words for traffic in everybody)
        return dataclasses.replace(
            report,
            bytes=sum(traffic.bytes for traffic in everybody),
            density=sum(traffic.changed for traffic in everybody) / words if words else 0.0,
            seconds=report.seconds | {"encode": max(traffic.encode_s for traffic in everybody)},
        )

    def forget(self) -> None:
        """Send everything in full next time."""
        self._stream.base.clear()

    def _receive(self, bucket: Bucket, group_name: str, client: WeightsClient) -> None:
        client.receive(*bucket_tensors(self._weights, bucket), group_name, DELTA_FORMAT)


@dataclasses.dataclass
class Traffic:
    """What one publisher sent in an update: bytes, changed words among all words, seconds of encoding."""

    bytes: int = 0
    changed: int = 0
    words: int = 0
    encode_s: float = 0.0


class _DeltaStream(_Stream):
    """A publisher's broadcasts of encoded buckets.

    Attributes:
        base: by HF name, what the engines acknowledged last, with its checksum.
    """

    def __init__(self, rank: int, backend: str, device: torch.device) -> None:
        super().__init__(rank, backend)
        self.base: dict[str, tuple[Words, bytes]] = {}
        self.traffic = Traffic()
        self._device = device
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) // local_ranks)
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="delta-codec")
        self._names: list[str] = []
        self._words: list[Words] = []
        self._encoded: list[Encoded] = []
        self._lacking: Tensor | None = None

    def send(self, gathered: GatheredBucket, called_off: Callable[[], bool]) -> None:
        """Start to broadcast the bucket, once the one before has been acknowledged; does nothing without a group."""
        if self.group is None:
            return
        merged = gathered.merge()
        words = [_host_words(tensor) for _, tensor in merged]
        names = [name for name, _ in merged]
        encoded = self._encode(names, words, full=False)
        self.finish(called_off)
        if self.group is None:
            return
        self._turn = gathered.bucket.turn
        self._names, self._words, self._encoded = names, words, encoded
        self.traffic.changed += sum(item.changed for item in encoded)
        self.traffic.words += sum(array.size for array in words)
        self._broadcast(full=not any(name in self.base for name in names))

    def finish(self, called_off: Callable[[], bool]) -> None:
        """Wait until all engines have applied the bucket, in full if need be; then it is what the next delta starts from."""
        if self._lacking is None:
            return
        super().finish(called_off)
        if self.group is not None and int(self._lacking):
            self._encoded = self._encode(self._names, self._words, full=True)
            self._broadcast(full=True)
            super().finish(called_off)
        if self.group is not None:
            for name, words, item in zip(self._names, self._words, self._encoded, strict=True):
                self._acknowledge(name, words, item.checksum)
        self._names, self._words, self._encoded, self._lacking = [], [], [], None

    def _encode(self, names: list[str], words: list[Words], *, full: bool) -> list[Encoded]:
        started = time.monotonic()

        def one(name: str, new: Words) -> Encoded:
            held = None if full else self.base.get(name)
            return encode(held[0], held[1], new) if held is not None else encode(None, NO_BASE, new)

        encoded = list(self._pool.map(one, names, words))
        self.traffic.encode_s += time.monotonic() - started
        return encoded

    def _broadcast(self, *, full: bool) -> None:
        body = torch.frombuffer(bytearray().join(item.data for item in self._encoded), dtype=torch.uint8)
        body = body.to(self._device)
        head = torch.tensor([body.numel(), int(full)], dtype=torch.int64, device=self._device)
        self._lacking = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._tensors = [head, body, self._lacking]
        self.traffic.bytes += head.nbytes + body.nbytes
        self._works = [
            dist.broadcast(head, group_src=0, group=self.group, async_op=True),
            dist.broadcast(body, group_src=0, group=self.group, async_op=True),
            dist.all_reduce(self._lacking, op=dist.ReduceOp.MAX, group=self.group, async_op=True),
        ]

    def _acknowledge(self, name: str, words: Words, checksum: bytes) -> None:
        held = self.base.get(name)
        if held is None:
            self.base[name] = (words.copy(), checksum)  # `words` may be the parameter itself
        elif held[1] != checksum:
            np.copyto(held[0], words)
            self.base[name] = (held[0], checksum)


def _host_words(tensor: Tensor) -> Words:
    """The tensor's numbers as unsigned integers of their width, flat, in host memory."""
    flat = tensor.detach().reshape(-1).cpu()
    words: Words = flat.view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")
    return words
