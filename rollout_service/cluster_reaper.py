"""Cleans up after the owner of a private Ray cluster: `python cluster_reaper.py NAME=VALUE PATH...`.

Ray's own processes end when their owner is killed, but not all at once: its agent looks for a dead control store for
up to a minute. The reaper waits for the end of its standard input, a pipe from the owner that the kernel closes
whatever ends the owner. Then it kills every process of this user whose environment holds `NAME=VALUE` (all that the
cluster ever started inherited it) and removes the given files and folders. Linux only; standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

PATIENCE_S = 10.0
QUIET_SCANS = 3  # in a row, before nothing is believed to be left: a process may fork while we look


def marked(mark: bytes) -> list[int]:
    """Living processes, other than this one, that inherited `mark` in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):  # empty for a zombie
                    found.append(int(entry))
        except OSError:
            continue  # another user's, or ended while we were looking
    return found


def main(mark: str, paths: list[str]) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # whoever ends the owner's whole family must not stop the clean-up
    while os.read(sys.stdin.fileno(), 4096):
        pass
    deadline = time.monotonic() + PATIENCE_S
    quiet = 0
    while quiet < QUIET_SCANS and time.monotonic() < deadline:
        pids = marked(mark.encode())
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


if __name__ == "__main__":
    if len(sys.argv) < 2 or "=" not in sys.argv[1]:
        sys.exit("usage: cluster_reaper.py NAME=VALUE PATH...")
    main(sys.argv[1], sys.argv[2:])
