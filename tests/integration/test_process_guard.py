"""The guard ends a command and all that it started, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_service import process_guard

# Starts a grandchild that leaves its session and outlives its parent, prints both pids, and sleeps.
FAMILY = """
import os, subprocess, sys, time
code = "import os, time; os.setsid(); print('orphan', os.getpid(), flush=True); time.sleep(600)"
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r])" % code
subprocess.run([sys.executable, "-c", middle])
print("command", os.getpid(), flush=True)
time.sleep(600)
"""


def guarded(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", process_guard.__file__, "--", sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def family(guard: subprocess.Popen[str]) -> dict[str, int]:
    assert guard.stdout is not None
    lines = [guard.stdout.readline().split() for _ in range(2)]
    return {name: int(pid) for name, pid in lines}


def assert_gone(pids: list[int], limit_s: float = 5.0) -> None:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except FileNotFoundError:
            return False

    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("pass", 0)])
def test_exit_status_is_the_commands(code: str, status: int) -> None:
    guard = guarded(code)
    assert guard.wait(timeout=10) == status
    killed = guarded("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait(timeout=10) == 128 + signal.SIGKILL


def test_closed_pipe_ends_command_and_orphans() -> None:
    guard = guarded(FAMILY)
    pids = family(guard)
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(timeout=10) == 128 + signal.SIGTERM
    assert_gone(list(pids.values()))


def test_sigterm_ends_command_and_orphans() -> None:
    guard = guarded(FAMILY)
    pids = family(guard)
    guard.terminate()
    assert guard.wait(timeout=10) == 128 + signal.SIGTERM
    assert_gone(list(pids.values()))


def test_orphans_end_with_the_command() -> None:
    guard = guarded(FAMILY)
    pids = family(guard)
    os.kill(pids["command"], signal.SIGKILL)
    assert guard.wait(timeout=10) == 128 + signal.SIGKILL
    assert_gone(list(pids.values()))


def test_command_ends_with_a_killed_guard() -> None:
    guard = guarded("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    assert guard.stdout is not None
    pid = int(guard.stdout.readline())
    guard.kill()
    guard.wait(timeout=10)
    assert_gone([pid])
