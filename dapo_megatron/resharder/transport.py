"""The seam between the resharder and the ways in which weights can travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollout_service.engine import EngineEndpoint


class WeightSyncError(RuntimeError):
    """A weight update did not reach an engine; the message names the phase, the rank and the engine."""


@dataclass(frozen=True)
class SyncReport:
    """What one update moved: `bytes` that left this rank, `seconds` by phase."""

    bytes: int
    seconds: dict[str, float]


class Transport(Protocol):
    """Moves the current weights of the trainer to every engine.

    All ranks call `send` together, between the service's `pause_for_update` and `resume_after_update`.
    """

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport: ...

    def close(self) -> None: ...
