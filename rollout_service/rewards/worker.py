"""The process side of the reward pool: a zygote that imports the rule once and forks workers from itself.

    pool (asyncio) --control socket--> zygote --fork--> worker <--own socket--> pool

Run as `python -P -m rollout_service.rewards.worker --rule NAME --extraction E --control-fd N --parent-pid P --memory-mb M`.
It is a plain program, not a `multiprocessing` child: it never imports the `__main__` of the process that owns the pool, which
inside a Ray actor is Ray's own start file. Forking a warm zygote makes a new worker ready in milliseconds.

The zygote has one thread and computes nothing after start-up, so forking is safe and it always answers. Workers die
with the zygote and the zygote with its owner: by PR_SET_PDEATHSIG, and by end-of-file on their sockets.

Control messages are five bytes, an operation and an int32: `F` (with one file descriptor) forks a worker on that
socket and answers `F` + pid; `K` + pid kills and reaps a worker and answers `K` + pid; `R` + flags is sent once when
ready. Worker messages are a 4-byte big-endian length and a JSON object: the inputs of `contract.request_of` in,
`{results: [[acc, extracted], ...]}` or `{error}` out. Only plain text and numbers cross: `str()` of a SymPy value can
hang.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from rollout_service.process_guard import PR_SET_PDEATHSIG, prctl
from rollout_service.rewards.contract import ContractError, RewardFunction, is_import_path, load_function
from rollout_service.rewards.rules import RULES, builtin_rule

CONTROL = struct.Struct("!ci")
LENGTH = struct.Struct("!I")
MAX_EXTRACTED_CHARS = 500
SPARE_MB = 64
# Flags of the message `R`: how the rule wants to be called.
PER_GROUP, ASYNC = 1, 2

# Known verdicts by rule: one that swallows its own failures and calls everything wrong (or right) must not start.
# The first of each goes through the rule's whole machinery, so that it also fills the caches that workers inherit.
CANARIES = {
    "math_verify": (
        ("2\\sqrt{3}", "Answer: \\sqrt{12}", 1.0),
        ("(1,\\pi)", "Answer: \\boxed{(1,2)}", 0.0),
        ("34", "Answer: 34", 1.0),
    ),
    "dapo_exact": (("34", "Answer: $34$", 1.0), ("34", "Answer: 35", 0.0)),
}


def die_with_parent(expected_parent: int) -> None:
    """Be killed when the parent dies, and exit now if it died before this call."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_parent:
        os._exit(0)


def address_space_mb() -> int:
    """Size of this process's address space in MiB, which RLIMIT_AS bounds."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize() >> 20


def read_exactly(sock: socket.socket, size: int) -> bytes | None:
    """`size` bytes, or None when the other side has closed."""
    chunks = bytearray()
    while len(chunks) < size:
        chunk = sock.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode("ascii")
    return LENGTH.pack(len(body)) + body


def answer(rule: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    """Apply the rule to one request. An exception of the rule is an answer of its own, never a verdict."""
    n = len(request["responses"]) if rule.per_group else 1
    try:
        verdicts = rule.verdicts(rule.call(request), n)
    except Exception as error:  # reported to the pool, which counts it and never treats it as wrong
        detail = str(error.args[0])[:600] if error.args and isinstance(error.args[0], str) else ""
        return {"error": detail if isinstance(error, ContractError) else f"{type(error).__name__}: {detail}"}
    return {"results": [(acc, None if text is None else text[:MAX_EXTRACTED_CHARS]) for acc, text in verdicts]}


def serve(sock: socket.socket, rule: RewardFunction) -> None:
    """Answer requests one at a time until the pool closes the socket."""
    while (header := read_exactly(sock, LENGTH.size)) is not None:
        body = read_exactly(sock, LENGTH.unpack(header)[0])
        if body is None:
            return
        sock.sendall(frame(answer(rule, json.loads(body))))


def run_worker(sock: socket.socket, rule: RewardFunction, memory_mb: int, zygote_pid: int) -> NoReturn:
    """The life of a forked worker. Leaves by `os._exit`, so nothing inherited from the zygote runs twice."""
    status = 1
    try:
        die_with_parent(zygote_pid)
        limit = memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve(sock, rule)
        status = 0
    finally:
        os._exit(status)


def zygote(control: socket.socket, rule: RewardFunction, memory_mb: int) -> None:
    """Fork and kill workers on request; kill all of them when the pool closes the control socket."""
    workers: set[int] = set()
    control.sendall(CONTROL.pack(b"R", PER_GROUP * rule.per_group + ASYNC * rule.is_async))
    me = os.getpid()
    try:
        while True:
            message, fds, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if len(message) < CONTROL.size:
                return
            operation, pid = CONTROL.unpack(message)
            if operation == b"F":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    run_worker(socket.socket(fileno=fds[0]), rule, memory_mb, me)
                os.close(fds[0])
                workers.add(pid)
            elif operation == b"K" and pid in workers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                workers.discard(pid)
            control.sendall(CONTROL.pack(operation, pid))
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)


def load_rule(name: str, extraction: str) -> RewardFunction:
    """The rule of that name, tried with its canaries.

    Raises:
        ContractError: it cannot be loaded, or does not know a canary's verdict.
    """
    if is_import_path(name):
        return load_function(name)
    if name not in RULES:
        raise ContractError(f"rollout.reward: no rule {name!r}; built in are {', '.join(sorted(RULES))}")
    rule = builtin_rule(name, extraction)
    for gold, response, expected in CANARIES[name]:
        acc, _ = rule(gold, response, False)
        if acc != expected:
            raise ContractError(f"the reward rule {name} scores {response!r} against {gold!r} as {acc}, not {expected}")
    return RewardFunction(name, rule, ("gold", "response", "truncated"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Zygote of the reward pool.")
    parser.add_argument("--rule", required=True)
    parser.add_argument("--extraction", required=True)
    parser.add_argument("--control-fd", required=True, type=int)
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--memory-mb", required=True, type=int)
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the owner, which closes the pool
    try:
        rule = load_rule(args.rule, args.extraction)
    except ContractError as error:
        sys.exit(str(error))
    used_mb = address_space_mb()
    if args.memory_mb < used_mb + SPARE_MB:
        sys.exit(
            f"rollout.reward.memory_limit_mb={args.memory_mb} is too small: a worker has {used_mb} MiB of address space "
            f"before its first sample and needs {SPARE_MB} MiB more"
        )
    zygote(socket.socket(fileno=args.control_fd), rule, args.memory_mb)


if __name__ == "__main__":
    main()
