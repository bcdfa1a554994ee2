"""A child process whose whole family ends with it, and with us.

The child runs under `rollout_service/process_guard.py`, which adopts orphans and kills every descendant when the
child exits, when it is told to, or when this process ends (even by SIGKILL).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rollout_service import process_guard


class GuardedProcess:
    """One command under the guard, writing to a log file.

    Attributes:
        name: words for messages, for example `the trainer`.
        log: file with the command's standard output and error.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as stream:
            self._guard = subprocess.Popen(
                [sys.executable, process_guard.__file__, "--", *command],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(env),
                # Ctrl-C in the terminal reaches this process alone, which then stops its children in order.
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Exit status of the command (128 + n when signal n ended it), or None while it runs."""
        return self._guard.poll()

    def terminate(self) -> None:
        """Ask the command to end (SIGTERM); its own handler may stop what it started."""
        if self.poll() is not None:
            return
        try:
            children = psutil.Process(self._guard.pid).children()
        except psutil.NoSuchProcess:
            return
        if not children:
            # Not spawned yet: the guard ends without it.
            self._guard.terminate()
            return
        # The command was the guard's first child; the others are orphans that it adopted.
        command = min(children, key=lambda process: process.create_time())
        try:
            os.kill(command.pid, signal.SIGTERM)
        except ProcessLookupError:
            return

    def kill(self, patience_s: float = 10.0) -> None:
        """End the command and every descendant at once (SIGKILL through the guard)."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the command; None when it still runs after `timeout_s`."""
        try:
            return self._guard.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None
