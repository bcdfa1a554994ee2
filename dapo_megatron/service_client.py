"""The trainer's view of the rollout service: rank 0 speaks to it, every rank learns the answer.

A call may take minutes (a batch that is still being generated), longer than a collective may wait. Rank 0 therefore announces
every few seconds that the call is still running, so the other ranks' waits stay short, and an error reaches all ranks alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from rollout_service.engine import EngineEndpoint
from rollout_service.ray_cluster import attach
from rollout_service.sample import Ticket

_ANNOUNCE_S = 5.0
_WARNINGS_TIMEOUT_S = 60.0


class ServiceError(RuntimeError):
    """The rollout service failed or did not answer; the message names the call."""


class ServiceClient:
    """Calls of the `RolloutService` actor. Methods marked *collective* are called by all ranks together."""

    def __init__(self, run_dir: Path, *, rank: int, device: torch.device, start_timeout_s: float) -> None:
        self._handle = attach(run_dir, start_timeout_s)
        self._rank = rank
        self._device = device

    def wait_started(self, timeout_s: float) -> None:
        """Collective: wait until the engines are up and the prompts are loaded."""
        self._call("start", 0, timeout_s=timeout_s)

    def next_batch(self, step: int, timeout_s: float, on_warning: Callable[[str], None]) -> bool:
        """Collective: wait until the batch of `step` is ready.

        Args:
            on_warning: called on rank 0, also while it waits, with what the service wants a user to see.

        Returns:
            False when the engines were restarted and need the current weights once more before they can generate.
        """
        return not self._call("next_batch", step, timeout_s=timeout_s, on_warning=on_warning)["republish"]

    def ticket(self, step: int, timeout_s: float) -> Ticket:
        """This rank's own copy of the ticket; cheap and idempotent once `next_batch(step)` has returned."""
        try:
            return ray.get(self._handle.ticket.remote(step), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise ServiceError(f"rank {self._rank}: ticket of step {step}: {_cause(error)}") from error

    def fetch(self, refs: list[Any]) -> list[dict[str, np.ndarray]]:
        """Read packed groups from the object store, zero-copy."""
        return ray.get(refs, timeout=300.0)

    def pause_for_update(self, version: int, timeout_s: float) -> list[EngineEndpoint]:
        """Collective: pause the engines; returns those that take part in the update."""
        return self._call("pause_for_update", version, timeout_s=timeout_s)

    def resume_after_update(self, version: int, step: int | None, timeout_s: float) -> None:
        """Collective: publish `version`, mark `step` as trained, and let the engines go on."""
        self._call("resume_after_update", version, step, timeout_s=timeout_s)

    def load_from_disk(self, path: Path, version: int, timeout_s: float) -> None:
        """Collective: the engines load a Hugging Face folder."""
        self._call("load_from_disk", str(path), version, timeout_s=timeout_s)

    def evaluate(self, name: str, version: int, timeout_s: float) -> dict[str, Any]:
        """Collective: evaluate a held-out set with the engines' weights of `version`."""
        return self._call("evaluate", name, version, timeout_s=timeout_s)

    def probe(self, sequences: list[list[int]], starts: list[int], timeout_s: float) -> dict[int, list[np.ndarray]]:
        """Collective: each engine's untempered log-probs of the given tokens from `starts[i]` on."""
        return self._call("probe", sequences, starts, timeout_s=timeout_s)

    def metrics(self, timeout_s: float) -> dict[str, float]:
        """Collective: running totals of the service."""
        return self._call("metrics", timeout_s=timeout_s)

    def _call(self, method: str, *args: Any, timeout_s: float, on_warning: Callable[[str], None] | None = None) -> Any:
        ref = getattr(self._handle, method).remote(*args) if self._rank == 0 else None
        deadline = time.monotonic() + timeout_s
        while True:
            status: list[tuple[str, Any]] = [("", None)]
            if self._rank == 0:
                status = [self._poll(ref, method, deadline, timeout_s, on_warning)]
            dist.broadcast_object_list(status, src=0, device=self._device)
            kind, value = status[0]
            if kind == "done":
                return value
            if kind == "error":
                raise ServiceError(value)

    def _poll(
        self, ref: Any, method: str, deadline: float, timeout_s: float, on_warning: Callable[[str], None] | None
    ) -> tuple[str, Any]:
        ready, _ = ray.wait([ref], timeout=max(0.0, min(_ANNOUNCE_S, deadline - time.monotonic())))
        try:
            if on_warning is not None:
                for message in ray.get(self._handle.take_warnings.remote(), timeout=_WARNINGS_TIMEOUT_S):
                    on_warning(message)
            if ready:
                return "done", ray.get(ref)
        except ray.exceptions.RayError as error:
            return "error", f"rollout service, {method}: {_cause(error)}"
        if time.monotonic() >= deadline:
            return "error", f"rollout service did not answer {method} within {timeout_s:.0f} s"
        return "running", None


def _cause(error: ray.exceptions.RayError) -> str:
    """The message of the exception raised in the service, without Ray's remote traceback."""
    cause = getattr(error, "cause", None)
    return (
        f"{type(cause).__name__}: {cause}"
        if cause is not None
        else f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    )
