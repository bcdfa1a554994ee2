"""One SGLang server process: its command line and the Ray actor that owns it.

It starts through `sglang_server.py`, on a CPU with the arguments that work there. The server runs under `process_guard.py`, so it ends with the actor, however the actor ends. The API key travels in a private file,
not on the command line, where every user of the machine could read it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Literal

import ray
import requests

from rollout_service.config import ServiceSettings
from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.sample import WeightVersion

Device = Literal["cpu", "cuda"]

PACKAGE = Path(__file__).resolve().parent
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ftp_proxy")
MAX_CPU_CACHE_TOKENS = 65536

# Server arguments that the service sets itself, and the setting that decides each.
OWNED_ARGUMENTS = {
    "model_path": "model.path",
    "dtype": "rollout.engine.dtype",
    "tp_size": "rollout.engine.tp_size",
    "host": "rollout.engine.host",
    "max_running_requests": "rollout.engine.max_running_requests",
    "trust_remote_code": "model.trust_remote_code",
    "port": "nothing: a free port is taken",
    "api_key": "nothing: a fresh key is made",
    "weight_version": "nothing: the service counts versions",
    "skip_tokenizer_init": "nothing: prompts are sent as token ids anyway",
    "dp_size": "rollout.engine.count",
    "enable_return_routed_experts": "rollout.router_replay",
    "config": "sglang.<argument>",
}


def without_proxies(environment: dict[str, str]) -> dict[str, str]:
    """A copy without proxy variables, in either case: engines, Ray and the service talk to each other directly."""
    return {key: value for key, value in environment.items() if key.lower() not in PROXY_VARIABLES}


def server_arguments(
    settings: ServiceSettings, device: Device, model_path: str, version: WeightVersion, engine_id: int
) -> dict[str, Any]:
    """SGLang server arguments by name (underscores), host, port and API key excepted.

    Raises:
        ValueError: `settings.sglang` sets an argument that a typed setting owns.
    """
    engine = settings.rollout.engine
    for name in settings.sglang:
        owner = OWNED_ARGUMENTS.get(name.replace("-", "_"))
        if owner is not None:
            raise ValueError(f"sglang.{name} is not yours to set; it is decided by {owner}")
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "weight_version": str(version),
        "tp_size": engine.tp_size,
        "dtype": settings.model_dtype if engine.dtype == "auto" else engine.dtype,
        "max_running_requests": engine.max_running_requests,
        "trust_remote_code": settings.trust_remote_code,
        "random_seed": settings.seed + engine_id,
        "skip_server_warmup": True,
        "enable_metrics": True,
    }
    if settings.rollout.router_replay:
        arguments["enable_return_routed_experts"] = True
    if device == "cpu":
        longest = settings.data.max_prompt_length + settings.rollout.max_response_length
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.1,
            # Room for every running request, but never less than one; beyond it the server retracts requests.
            "max_total_tokens": max(longest + 64, min(engine.max_running_requests * longest, MAX_CPU_CACHE_TOKENS)),
            "sleep_on_idle": True,  # an idle scheduler would spin on most of a core
        }
    return arguments | {name.replace("-", "_"): value for name, value in settings.sglang.items()}


def argument_list(arguments: dict[str, Any]) -> list[str]:
    """Spell server arguments for the command line: true is a bare flag, false and null are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        else:
            words += [flag, str(value)]
    return words


def server_command(python: str, words: list[str]) -> list[str]:
    """The command that serves. `-P` keeps this package's folder off the import path of the start file."""
    return [python, "-P", str(PACKAGE / "sglang_server.py"), *words]


def server_environment(device: Device) -> dict[str, str]:
    environment = without_proxies(dict(os.environ))
    environment |= {
        "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is fetched
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",  # SGLang renames its processes; the environment must stay readable (cluster_reaper.py)
        # /health then only says that the server is up; a probe that generates a token would hang while it is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def log_tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log file, for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def new_api_key() -> str:
    """A fresh secret. Letters and digits only: SGLang hands it to argparse, which takes a leading `-` for an option."""
    return secrets.token_hex(24)


class SglangServer:
    """Ray actor that owns one server process. Its log is `<run_dir>/logs/engine_<id>.log`."""

    def __init__(self, settings: ServiceSettings, engine_id: int, device: Device) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._device: Device = device
        self._log_path = Path(settings.run_dir) / "logs" / f"engine_{engine_id}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model_path: str, version: WeightVersion) -> EngineEndpoint:
        """Start the server with the weights of `model_path` as `version` and wait until it is healthy.

        Raises:
            EngineError: it ended or was not healthy within the start-up timeout; the message ends with its log's tail.
        """
        engine = self._settings.rollout.engine
        deadline = time.monotonic() + engine.startup_timeout_s
        self.stop()
        while True:
            endpoint, log_start = self._spawn(model_path, version)
            if self._wait_healthy(endpoint, deadline):
                return endpoint
            assert self._process is not None
            status = self._process.poll()
            tail = log_tail(self._log_path)
            self.stop()
            with self._log_path.open("rb") as log:
                log.seek(log_start)
                port_lost = b"address already in use" in log.read().lower()
            if status is not None and port_lost and time.monotonic() < deadline:
                continue  # another program took the port between our look and the server's bind
            what = (
                f"was not healthy within rollout.engine.startup_timeout_s={engine.startup_timeout_s:g}"
                if status is None
                else f"ended with status {status} while starting"
            )
            raise EngineError(f"engine {self._engine_id} {what}. End of {self._log_path}:\n{tail}")

    def poll(self) -> int | None:
        """None while the server runs, else its exit status (negative: not started)."""
        return -1 if self._process is None else self._process.poll()

    def log_tail(self) -> str:
        return log_tail(self._log_path)

    def stop(self) -> None:
        """End the server and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()  # the server's parent-death signal does the rest
                process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _spawn(self, model_path: str, version: WeightVersion) -> tuple[EngineEndpoint, int]:
        engine = self._settings.rollout.engine
        port = free_port(engine.host)
        api_key = new_api_key()
        key_file = self._log_path.with_suffix(".yaml")
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        key_file.unlink(missing_ok=True)
        with open(os.open(key_file, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
            file.write(f'api-key: "{api_key}"\n')
        arguments = server_arguments(self._settings, self._device, model_path, version, self._engine_id)
        arguments |= {"host": engine.host, "port": port, "config": str(key_file)}
        command = server_command(engine.python or sys.executable, argument_list(arguments))
        guard = [sys.executable, "-I", "-S", str(PACKAGE / "process_guard.py"), "--"]
        log: IO[bytes]
        with self._log_path.open("ab") as log:
            log.write(f"\n=== {' '.join(command)}\n".encode())
            log.flush()
            log_start = log.tell()
            self._process = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(self._device),
                start_new_session=True,
            )
        host = ray.util.get_node_ip_address() if engine.host in ("0.0.0.0", "::") else engine.host
        endpoint = EngineEndpoint(self._engine_id, f"http://{host}:{port}", api_key, engine.tp_size, alive=True)
        return endpoint, log_start

    def _wait_healthy(self, endpoint: EngineEndpoint, deadline: float) -> bool:
        assert self._process is not None
        with requests.Session() as session:
            session.trust_env = False
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    if session.get(endpoint.url + "/health", headers=endpoint.headers, timeout=5).ok:
                        return True
                except requests.RequestException:
                    pass  # not listening yet
                time.sleep(0.2)
        return False
