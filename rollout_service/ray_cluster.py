"""The Ray cluster that carries the service: start a private one or join one, and find the service in it.

A private cluster lives and dies with the process that started it (SIGKILL included, see `cluster_reaper.py`) and keeps
its files in a short folder of its own under the system's temporary folder. Ray listens on the machine's address, so the
cluster has its own access token, in a private file of the run folder; who lacks it is refused. What others need to reach the service stands in `<run_dir>/service.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._raylet
import ray.exceptions

from rollout_service import cluster_reaper
from rollout_service.config import RaySection
from rollout_service.server_process import PROXY_VARIABLES

SERVICE_FILE = "service.json"
TOKEN_FILE = "ray_token"
ACTOR_NAME = "rollout_service"
CLUSTER_MARK = "DAPO_RAY_CLUSTER"  # environment variable of all that a private cluster starts
REAPER_TIMEOUT_S = 12.0
_TEMP_PREFIX = "dapo-ray-"
_PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)

# Ray reads these when it starts its processes.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # errors of calls that nobody waits for any more are in service.log
}


class ClusterError(RuntimeError):
    """Ray or the service in it could not be reached; the message says what was tried for how long."""


@dataclass(slots=True)
class Cluster:
    """A connection to Ray, and the private cluster behind it, if any."""

    address: str
    namespace: str
    run_dir: Path
    temp_dir: Path | None = None
    reaper: subprocess.Popen[bytes] | None = None

    def write_service_file(self, ready: bool) -> None:
        """Write `<run_dir>/service.json`: where the service is, who started it, whether it is ready."""
        content = {
            "ray_address": self.address,
            "namespace": self.namespace,
            "actor": ACTOR_NAME,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "token_file": str(self.run_dir / TOKEN_FILE) if self.temp_dir else None,
            "ready": ready,
        }
        path = self.run_dir / SERVICE_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(path)

    def close(self) -> None:
        """Disconnect; a private cluster ends, and its files with it."""
        (self.run_dir / SERVICE_FILE).unlink(missing_ok=True)
        ray.shutdown()
        if self.reaper is not None:
            _reap(self.reaper)


def connect(section: RaySection, run_name: str, run_dir: Path | str, head: bool) -> Cluster:
    """Connect this process to Ray as the owner of the run's service, and write `service.json`.

    Call it from a thread that lives as long as the cluster should (the main thread): Linux ends Ray's processes with
    the thread that started them.

    Args:
        head: start a private cluster when `section.address` is null; false demands a running one.

    Raises:
        ClusterError: no cluster was reached or started.
    """
    run_dir = Path(run_dir).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / SERVICE_FILE).unlink(missing_ok=True)
    namespace = f"dapo-{run_name}"
    if section.address is not None:
        address = _init(namespace, address=section.address)
        cluster = Cluster(address, namespace, run_dir)
    elif head:
        temp_dir = _make_temp_dir()
        _use_token(_write_token(run_dir))
        mark = secrets.token_hex(8)
        reaper = _start_reaper(mark, [temp_dir, run_dir / TOKEN_FILE, run_dir / SERVICE_FILE])
        try:
            address = _init(
                namespace,
                mark,
                include_dashboard=False,
                num_cpus=1,  # the service's actors ask for none; Ray would start one idle worker for each
                object_store_memory=section.object_store_memory_mb * 1024 * 1024,
                _temp_dir=str(temp_dir),
            )
        except BaseException:
            _reap(reaper)
            raise
        cluster = Cluster(address, namespace, run_dir, temp_dir, reaper)
    else:
        raise ClusterError("ray.address is null and this process may not start a cluster: give the address of one")
    cluster.write_service_file(ready=False)
    return cluster


def attach(run_dir: Path | str, timeout_s: float) -> Any:
    """Connect this process to the cluster of a run and return the handle of its service.

    Waits for `service.json` and for the actor. The service may still be starting; its calls wait for that.

    Raises:
        ClusterError: not found within `timeout_s`, or the process that owns the service is gone.
    """
    path = Path(run_dir) / SERVICE_FILE
    deadline = time.monotonic() + timeout_s
    info = _wait_for_file(path, deadline, timeout_s)
    if info["token_file"] is not None:
        _use_token(Path(info["token_file"]))
    _init(info["namespace"], address=info["ray_address"])
    while True:
        try:
            return ray.get_actor(info["actor"], namespace=info["namespace"])
        except ValueError as error:
            _require_owner(info, path)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster at {info['ray_address']} has no actor {info['actor']!r} in namespace "
                    f"{info['namespace']!r} after {timeout_s:g} s"
                ) from error
            time.sleep(0.2)


def _wait_for_file(path: Path, deadline: float, timeout_s: float) -> dict[str, Any]:
    while True:
        with contextlib.suppress(FileNotFoundError):
            info: dict[str, Any] = json.loads(path.read_text())
            if _owner_alive(info):
                return info
            # Left by a run that was killed; the one that starts now replaces it.
        if time.monotonic() > deadline:
            raise ClusterError(
                f"no rollout service announced itself in {path} within {timeout_s:g} s (ray.start_timeout_s): "
                "is `dapo rollout` running with the same run.name and run.dir?"
            )
        time.sleep(0.1)


def _owner_alive(info: dict[str, Any]) -> bool:
    if info["host"] != socket.gethostname():
        return True  # cannot be seen from here
    return Path(f"/proc/{info['pid']}").exists()


def _require_owner(info: dict[str, Any], path: Path) -> None:
    if not _owner_alive(info):
        raise ClusterError(f"the rollout service's process {info['pid']} (from {path}) is gone; see its log")


def _init(namespace: str, mark: str | None = None, **arguments: Any) -> str:
    """`ray.init`, quietly and without proxies; returns the cluster's address."""
    with _ray_environment(mark):
        try:
            ray.init(
                namespace=namespace,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": _python_path()}},
                **arguments,
            )
        except (ray.exceptions.RayError, ConnectionError, OSError, RuntimeError, ValueError) as error:
            where = arguments.get("address") or "a private cluster"
            raise ClusterError(f"Ray did not start or join {where}: {error}") from error
    return str(ray.get_runtime_context().gcs_address)


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([_PACKAGE_ROOT, *(part for part in inherited.split(os.pathsep) if part)])


@contextlib.contextmanager
def _ray_environment(mark: str | None) -> Iterator[None]:
    """Ray's settings in the environment; while Ray starts its processes also the cluster's mark, but no proxies."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    proxies = {name: value for name, value in os.environ.items() if name.lower() in PROXY_VARIABLES}
    for name in proxies:
        del os.environ[name]
    if mark is not None:
        os.environ[CLUSTER_MARK] = mark
    try:
        yield
    finally:
        os.environ.pop(CLUSTER_MARK, None)
        os.environ.update(proxies)


def _start_reaper(mark: str, paths: list[Path]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(Path(cluster_reaper.__file__)), f"{CLUSTER_MARK}={mark}"]
    return subprocess.Popen([*command, *map(str, paths)], stdin=subprocess.PIPE, start_new_session=True)


def _reap(reaper: subprocess.Popen[bytes]) -> None:
    """Let the reaper do its work now, and wait for it."""
    assert reaper.stdin is not None
    reaper.stdin.close()
    try:
        reaper.wait(REAPER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        reaper.kill()
        reaper.wait()


def _write_token(run_dir: Path) -> Path:
    path = run_dir / TOKEN_FILE
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _use_token(path: Path) -> None:
    """Let Ray, in this process and its children, use the token in `path` instead of one under the home folder."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ.pop("RAY_AUTH_TOKEN", None)
    # Ray read its environment when it was imported; this makes it read again.
    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _make_temp_dir() -> Path:
    """A fresh folder with a short path (Ray puts Unix sockets into it); those of killed runs are removed."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{_TEMP_PREFIX}*"):
        pid = folder.name.removeprefix(_TEMP_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{os.getpid()}-", dir=parent))
