"""The engine side of a weight update without an engine: a process that keeps the tensors that it receives.

It answers the calls of SGLang's server that `WeightsClient` makes, joins the publishers' groups as SGLang does, receives
one broadcast per tensor (or runs the engine's side of another transport, `rollout_service.weight_loader`), and reports
checksums. It has no model, so nothing about loading weights is shown with it; for that the tests with a real SGLang server
are there. It can be told to fail at a certain bucket.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollout_service.engine import EngineEndpoint
from rollout_service.process_guard import PR_SET_PDEATHSIG, prctl

Fault = tuple[str, int]  # `die`, `hang` or `refuse`, and at which bucket, counted from 0 over all updates


class Receivers:
    """Starts receivers: one process that has torch loaded and forks for each of them. Use as a context manager."""

    def __init__(self) -> None:
        self._host = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.weight_receiver"],
            cwd=Path(__file__).resolve().parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, count: int, faults: dict[int, Fault] | None = None, keep: bool = True) -> list[EngineEndpoint]:
        """End the receivers of before and start new ones, as engines 0, 1, ...

        Args:
            faults: by engine id.
            keep: hash the tensors and report them; without it they are dropped on arrival.
        """
        assert self._host.stdin is not None and self._host.stdout is not None
        wanted = [{"fault": (faults or {}).get(engine), "keep": keep} for engine in range(count)]
        self._host.stdin.write(json.dumps(wanted) + "\n")
        self._host.stdin.flush()
        ports = json.loads(self._host.stdout.readline())
        return [EngineEndpoint(i, f"http://127.0.0.1:{port}", None, 1, alive=True) for i, port in enumerate(ports)]

    def __enter__(self) -> Receivers:
        return self

    def __exit__(self, *_: object) -> None:
        self._host.kill()
        self._host.wait()


def _host() -> None:
    """Fork receivers as the lines of standard input ask for, and write their ports, a line for each."""
    import dapo_megatron.resharder.process_group  # noqa: F401  (loads torch before the first fork)
    import rollout_service.weight_loader  # noqa: F401  (loads torch, too, before the first fork)

    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    children: list[int] = []
    for line in sys.stdin:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        children, ports = [], []
        for wanted in json.loads(line):
            ours, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                _serve(theirs, tuple(wanted["fault"]) if wanted["fault"] else None, wanted["keep"])
                os._exit(0)
            children.append(pid)
            ports.append(int(os.read(ours, 16)))
            os.close(ours)
            os.close(theirs)
        print(json.dumps(ports), flush=True)


def _serve(pipe: int, fault: Fault | None, keep: bool) -> None:
    receiver = _Receiver(fault, keep)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._reply(200, receiver.info())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                receiver.call(self.path, body)
            except Exception as error:
                self._reply(400, {"success": False, "message": str(error)})
            else:
                self._reply(200, {"success": True, "message": ""})

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    os.write(pipe, str(server.server_port).encode())
    server.serve_forever()


class _Receiver:
    def __init__(self, fault: Fault | None, keep: bool) -> None:
        self._fault = fault
        self._keep = keep
        self._groups: dict[str, Any] = {}
        self._open = False
        self._buckets = 0
        self.version = "0"
        self.digests: dict[str, str] = {}
        self.bytes = 0

    def info(self) -> dict[str, Any]:
        return {
            "weight_version": self.version,
            "digests": self.digests,
            "bytes": self.bytes,
            "groups": len(self._groups),
        }

    def call(self, path: str, body: dict[str, Any]) -> None:
        import torch.distributed as dist

        from dapo_megatron.resharder.process_group import create_publisher_group

        if path == "/init_weights_update_group":
            assert body["group_name"] not in self._groups
            self._groups[body["group_name"]] = create_publisher_group(
                body["master_address"], body["master_port"], body["rank_offset"], body["world_size"], body["group_name"], "gloo", 300.0
            )  # fmt: skip
        elif path == "/destroy_weights_update_group":
            dist.destroy_process_group(self._groups.pop(body["group_name"]))
        elif path == "/begin_weight_update":
            assert not self._open, "a weight-update session is already open"
            self._open = True
        elif path == "/update_weights_from_distributed":
            assert self._open, "no weight-update session is open"
            self._receive(body)
        elif path == "/end_weight_update":
            self._open = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        else:
            raise ValueError(f"unknown call {path}")

    def _receive(self, body: dict[str, Any]) -> None:
        if self._fault is not None and self._fault[1] == self._buckets:
            kind, self._fault = self._fault[0], None
            if kind == "die":
                os._exit(1)
            if kind == "refuse":
                raise RuntimeError("Failed to update parameter online")
            time.sleep(3600)
        self._buckets += 1
        tensors = self._take(body)
        self.bytes += sum(tensor.nbytes for _, tensor in tensors)
        if self._keep:
            for name, tensor in tensors:
                self.digests[name] = digest(tensor)

    def _take(self, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """The tensors of a call, by whatever transport."""
        import torch
        import torch.distributed as dist

        from rollout_service import weight_loader

        described = body["names"], body["dtypes"], body["shapes"]
        try:
            if body.get("load_format") == weight_loader.SHARED_MEMORY_FORMAT:
                return weight_loader.receive_shared_memory(*described, body["group_name"])
            group = self._groups[body["group_name"]]
            if body.get("load_format") == weight_loader.DELTA_FORMAT:
                return weight_loader.receive_delta(*described, group, torch.device("cpu"))
            tensors, works = [], []
            for name, dtype, shape in zip(*described, strict=True):
                tensors.append((name, torch.empty(shape, dtype=getattr(torch, dtype))))
                works.append(dist.broadcast(tensors[-1][1], group_src=0, group=group, async_op=True))
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"Failed to receive weights: {error}") from error
        return tensors


def digest(tensor: Any) -> str:
    """Of the dtype, the shape and every byte."""
    import torch

    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content).hexdigest()


if __name__ == "__main__":
    _host()
