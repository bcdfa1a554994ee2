"""The seam between the resharder and the ways in which weights can travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollout_service.engine import EngineEndpoint


class WeightSyncError(RuntimeError):
    """A weight update did not reach an engine; the message names the phase, the rank and the engine."""


@dataclass(frozen=True)
class SyncReport:
    """What one update moved; the same on all ranks.

    Attributes:
        planned_bytes: what each engine needs.
        bytes: what left the trainer, once for all engines together; more than planned when a part was repeated.
        seconds: wall time by phase. Phases may overlap: `gather` runs while earlier buckets are in `send`.
        lost: engines that were left out after the update had begun, with the reason.
        density: share of the numbers that changed since the version of before, where the transport knows.
    """

    planned_bytes: int
    bytes: int
    seconds: dict[str, float]
    lost: tuple[str, ...] = ()
    density: float | None = None

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes that left the trainer per second of the phase `send`."""
        return self.bytes / 1e9 / max(self.seconds.get("send", 0.0), 1e-9)


class Transport(Protocol):
    """Moves the current weights of the trainer to every engine.

    All ranks call `send` together, between the service's `pause_for_update` and `resume_after_update`. An engine that is
    lost on the way is left out: the service finds that it does not report the version and restarts it.
    """

    def send(self, endpoints: list[EngineEndpoint], version: int) -> SyncReport:
        """
        Raises:
            WeightSyncError: no engine got the weights, or a rank of the trainer did not do its part.
        """
        ...

    def close(self) -> None: ...
