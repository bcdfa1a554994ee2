"""Weights through a shared file system: rank 0 writes a Hugging Face folder, the engines load it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_convert.export import export_hf
from checkpoint_convert.mapping import ParamMapping
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.resharder.gather import NamedTensor, collect_on_rank_zero
from dapo_megatron.resharder.transport import SyncReport
from rollout_service.engine import EngineEndpoint
from rollout_service.weights_client import WeightsClient


def write_hf_folder(
    mapping: Mapping[str, ParamMapping],
    buckets: Iterator[list[NamedTensor]],
    layout: Layout,
    publishers: list[int],
    *,
    target: Path,
    source: Path,
    dtype: torch.dtype,
) -> int:
    """Write the whole model as a Hugging Face folder; all ranks call it together.

    Args:
        buckets: `gather_buckets` of this rank.
        publishers: global rank of each stage's publisher.
        target: folder to create, atomically.
        source: folder with the config and tokenizer to copy.

    Returns:
        Bytes of tensors written by rank 0; 0 elsewhere.
    """
    tensors = collect_on_rank_zero(buckets, layout, publishers)
    written = 0
    if layout.rank == 0:

        def counted() -> Iterator[NamedTensor]:
            nonlocal written
            for name, tensor in tensors:
                written += tensor.numel() * tensor.element_size()
                yield name, tensor

        export_hf(mapping, counted(), target, source, dtype)
    else:
        for _ in tensors:
            pass
    dist.barrier()
    return written


class DiskTransport:
    """Writes each version to `<folder>/v<version>` and keeps only the newest."""

    def __init__(
        self,
        layout: Layout,
        mapping: Mapping[str, ParamMapping],
        buckets: Callable[[], Iterator[list[NamedTensor]]],
        publishers: list[int],
        *,
        folder: Path,
        source: Path,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        self._layout = layout
        self._mapping = mapping
        self._buckets = buckets
        self._publishers = publishers
        self._folder = folder
        self._source = source
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._previous: Path | None = None

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        target = self._folder / f"v{version}"
        start = time.perf_counter()
        if self._layout.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        written = write_hf_folder(
            self._mapping,
            self._buckets(),
            self._layout,
            self._publishers,
            target=target,
            source=self._source,
            dtype=self._dtype,
        )
        wrote = time.perf_counter()
        if self._layout.rank == 0:
            for endpoint in endpoints:
                WeightsClient(endpoint, self._timeout_s).update_from_disk(str(target), version)
            if self._previous is not None:
                shutil.rmtree(self._previous)
            self._previous = target
        dist.barrier()
        return SyncReport(bytes=written, seconds={"write": wrote - start, "load": time.perf_counter() - wrote})

    def close(self) -> None:
        """The newest version stays: a restarted engine may still load it."""
