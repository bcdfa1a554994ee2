"""`run_service`: the rollout service as one blocking call, from Ray's start to the last process's end."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

import ray
import ray.exceptions

from rollout_service import ray_cluster
from rollout_service.config import ServiceSettings
from rollout_service.service import start_service

SHUTDOWN_S = 8.0  # for the service's own orderly end; what is left then ends with Ray
FAILURE_GRACE_S = 3.0  # after a failure the trainer's calls are still answered with its cause
CHECK_S = 0.25


class _Stop(BaseException):
    """A signal asked the service to end."""


def run_service(settings: ServiceSettings) -> None:
    """Start Ray (or join it), start the service with version 0, announce it, and serve until SIGTERM or SIGINT.

    Call it from the main thread. Returns after a signal, when every process of the service has ended (within 15 s).
    `<run_dir>/service.json` exists meanwhile, with `ready` true once prompts are being generated.

    Raises:
        Exception: the service did not start, or ended by itself; the message says why.
    """
    stop = threading.Event()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    cluster = None
    handle = None
    try:
        cluster = ray_cluster.connect(settings.ray, settings.run_name, settings.run_dir, head=True)
        # Ray replaces the SIGTERM handler of a driver.
        for number in previous:
            signal.signal(number, on_signal)
        handle = start_service(settings)
        _wait(handle.start.remote(0), stop)
        cluster.write_service_file(ready=True)
        print(f"rollout service ready: {settings.run_dir}", file=sys.stderr, flush=True)
        try:
            _wait(handle.until_failure.remote(), stop)
        except Exception:
            stop.wait(FAILURE_GRACE_S)
            raise
    except _Stop:
        pass
    finally:
        _shut_down(cluster, handle)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(ref: Any, stop: threading.Event) -> Any:
    """`ray.get` that a signal interrupts."""
    while True:
        ready, _ = ray.wait([ref], timeout=CHECK_S)
        if stop.is_set():
            raise _Stop
        if ready:
            try:
                return ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from error


def _shut_down(cluster: ray_cluster.Cluster | None, handle: Any) -> None:
    if cluster is None:
        return
    if handle is not None:
        with suppress(ray.exceptions.RayError):
            ray.get(handle.shutdown.remote(), timeout=SHUTDOWN_S)
        ray.kill(handle)
    cluster.close()
