"""Do the engines hold what the trainer sent, bit for bit?

An engine's parameters are fused, cut over its ranks and perhaps laid out anew for its kernels, so the trainer cannot compute
their checksums. But the same weights must give the same parameters again. After an update the server's own checksums of all
parameters are taken (`/weights_checker`, every tensor-parallel rank), all parameters are overwritten with random numbers, the same
version is sent again, in full, and the checksums are compared. So a wrong byte of either transfer is found, and so is a parameter that no
transfer writes.

A checked update costs a second full transfer. The engine reports version -1 meanwhile, so that one that fails in between is not
taken for one that has its weights.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch.distributed as dist

from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.resharder.transport import SyncReport, Transport, WeightSyncError
from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.weights_client import WeightsClient

logger = logging.getLogger(__name__)

_SHOWN = 4  # parameters that a message names

Checksums = list[dict[str, str]]  # of an engine's ranks: parameter -> checksum


def check_engines(
    transport: Transport,
    endpoints: list[EngineEndpoint],
    version: int,
    report: SyncReport,
    *,
    layout: Layout,
    timeout_s: float,
) -> SyncReport:
    """Check all engines that got `version`; all ranks call it together, right after `transport.send` of that version.

    Args:
        transport: sends everything the next time it is asked.
        report: of that update.

    Returns:
        The report with the seconds of the check, and the engines that were lost in it.

    Raises:
        WeightSyncError: an engine's parameters differ; names the engine and the parameters.
    """
    started = time.perf_counter()
    checked = [e for e in endpoints if not any(e.name in reason for reason in report.lost)]
    before: dict[int, Checksums] = {}  # by engine id, on rank 0
    wrong: dict[int, str] = {}
    lost = _on_all(checked, partial(_scramble, before), layout, timeout_s)
    checked = [e for e in checked if e.engine_id not in lost]
    if checked:
        again = transport.send(checked, version)
        lost |= {e.engine_id: reason for e in checked for reason in again.lost if e.name in reason}
        checked = [e for e in checked if e.engine_id not in lost]
    refused = _on_all(checked, partial(_compare, before, wrong), layout, timeout_s)
    verdict = [wrong]
    dist.broadcast_object_list(verdict, src=0, device=layout.device)
    if verdict[0]:
        raise WeightSyncError(
            f"weight update {version}: a second transfer of the same weights gave other parameters "
            f"(weight_sync.check=never switches this check off): {'; '.join(verdict[0].values())}"
        )
    lost |= refused
    if lost and layout.rank == 0:
        logger.error("lost while version %d was checked: %s", version, "; ".join(lost.values()))
    seconds = report.seconds | {"check": time.perf_counter() - started}
    return dataclasses.replace(report, seconds=seconds, lost=(*report.lost, *lost.values()))


def _scramble(before: dict[int, Checksums], client: WeightsClient) -> None:
    before[client.endpoint.engine_id] = _checksums(client)
    client.scramble()


def _compare(before: dict[int, Checksums], wrong: dict[int, str], client: WeightsClient) -> None:
    """Note the parameters that are others than before."""
    engine = client.endpoint.engine_id
    pairs = enumerate(zip(before[engine], _checksums(client), strict=True))
    names = [f"{name} of rank {rank}" for rank, (old, new) in pairs for name in old if old[name] != new.get(name)]
    if names:
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        wrong[engine] = f"{client.endpoint.name}: {', '.join(names[:_SHOWN])}{rest}"


def _checksums(client: WeightsClient) -> Checksums:
    ranks: list[dict[str, Any]] = client.checksum()["ranks"]
    return [rank["checksums"] for rank in ranks]


def _on_all(
    engines: Sequence[EngineEndpoint], work: Callable[[WeightsClient], None], layout: Layout, timeout_s: float
) -> dict[int, str]:
    """Rank 0 does `work` with all engines at once; all ranks learn which failed, and why."""
    answer: list[dict[int, str]] = [{}]
    if layout.rank == 0 and engines:

        def one(engine: EngineEndpoint) -> str | None:
            client = WeightsClient(engine, timeout_s)
            try:
                work(client)
            except EngineError as error:
                return str(error)
            finally:
                client.close()
            return None

        with ThreadPoolExecutor(len(engines)) as pool:
            faults = pool.map(one, engines)
            answer = [{e.engine_id: fault for e, fault in zip(engines, faults, strict=True) if fault is not None}]
    dist.broadcast_object_list(answer, src=0, device=layout.device)
    return answer[0]
