"""A small parent for a server process: `python process_guard.py -- COMMAND...`.

It makes sure that the command and everything that the command ever started end

- when the process that started the guard ends, however it ends (the guard's standard input is a pipe from it, which
  the kernel closes even after SIGKILL and, unlike a parent-death signal, does not depend on a thread);
- when the guard itself is told to stop (SIGTERM, SIGINT) or is killed (parent-death signal on the command);
- when the command exits.

Orphaned grandchildren are adopted by the guard (child subreaper), so nothing escapes by forking twice. The exit
status is the command's. Linux only; standard library only, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call prctl(2).

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def descendants(root: int) -> list[int]:
    """Process ids of all living descendants of `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it ended while we were looking
        # pid (command) state ppid ...; the command may hold spaces and brackets
        parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
        children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found.extend(frontier)
    return found


def _is_resource_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_descendants(patience_s: float = 5.0) -> None:
    """SIGKILL every descendant of this process and reap those that are its own children.

    Python's resource trackers are spared for a second: they end by themselves once their users are gone, and remove
    the semaphores that those left in /dev/shm.
    """
    started = time.monotonic()
    deadline = started + patience_s
    while True:
        pids = descendants(os.getpid())
        for pid in pids:
            if time.monotonic() < started + 1.0 and _is_resource_tracker(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def main(command: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)

    def wake(signum: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(wake_write, b"t" if signum != signal.SIGCHLD else b"c")

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, wake)
    guard = os.getpid()

    def tie_to_guard() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # the guard ended between fork and prctl
            os._exit(1)

    # A session of its own: a Ctrl-C in the terminal reaches the launcher, which stops the server in order.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie_to_guard)
    status = None
    while status is None:
        readable, _, _ = select.select([sys.stdin.fileno(), wake_read], [], [])
        if sys.stdin.fileno() in readable and os.read(sys.stdin.fileno(), 4096) == b"":
            break
        if wake_read in readable and b"t" in os.read(wake_read, 4096):
            break
        status = child.poll()
    kill_descendants()
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "--":
        sys.exit("usage: process_guard.py -- COMMAND...")
    sys.exit(main(sys.argv[2:]))
