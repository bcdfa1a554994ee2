"""From the logs of a failed run to one cause."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 200_000
_TAIL_LINES = 12
# `package.module.SomeError: words` or a bare `KeyboardInterrupt`; Ray writes `RayTaskError(SomeError): ...`.
_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:\(\w+\))?(?::\s.*|)$")
# What a process says when another one failed first.
_AFTERMATH = re.compile(
    r"closed by peer|reset by peer|Broken pipe|SIGTERM|SignalException|ChildFailedError|ActorDied|ActorUnavailable|"
    r"DistBackendError|DistNetworkError|\[.*gloo.*\]|Timed out waiting|KeyboardInterrupt|SystemExit"
)
# Once the process group is up, torch puts this before each line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_TORCHRUN_SIGNAL = re.compile(r"exitcode\s*:\s*-(\d+)\s*\(pid: (\d+)\)")


@dataclass(frozen=True)
class Cause:
    """Why a process failed.

    Attributes:
        where: process in words (`trainer rank 1`).
        reason: the exception's line, or the best that the log offers.
        log: file that says so.
        tail: its last lines.
        is_aftermath: the reason only says that another process failed.
    """

    where: str
    reason: str
    log: Path
    tail: tuple[str, ...]
    is_aftermath: bool


def find_cause(sources: Sequence[tuple[str, Path]]) -> Cause | None:
    """The first log that names a failure of its own; else one that names the aftermath of another's.

    Args:
        sources: `(process in words, log file)`, the likeliest first; files may be missing.
    """
    causes = [cause for where, log in sources if (cause := _cause_in(where, log)) is not None]
    return next((c for c in causes if not c.is_aftermath), causes[0] if causes else None)


def trainer_sources(logs: Path) -> list[tuple[str, Path]]:
    """Log files of the trainer's ranks (torchrun's layout), then torchrun's own."""
    by_rank = sorted(
        ((int(path.parent.name), path) for path in (logs / "ranks").glob("*/attempt_*/*/stderr.log")),
        # The first rank to stop writing is the likeliest culprit.
        key=lambda item: item[1].stat().st_mtime,
    )
    return [(f"trainer rank {rank}", path) for rank, path in by_rank] + [("the trainer", logs / "trainer.log")]


def service_sources(logs: Path) -> list[tuple[str, Path]]:
    """Log files of the rollout service, then of its engines."""
    engines = [(path.stem.replace("_", " "), path) for path in sorted(logs.glob("engine_*.log"))]
    return [("the rollout service", logs / "rollout.log"), *engines]


def tail_lines(log: Path, count: int = _TAIL_LINES) -> tuple[str, ...]:
    """Last non-empty lines of a log; empty when there is none."""
    return tuple(_read_tail(log)[-count:])


def exit_words(status: int) -> str:
    """`exit code 3`, or the signal's name with its usual reason."""
    number = status - 128 if status > 128 else -status
    if number <= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {status}"
    hint = " (usually the kernel's out-of-memory killer)" if number == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def _read_tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [_RANK_PREFIX.sub("", line).rstrip() for line in text.splitlines() if line.strip()]


def _cause_in(where: str, log: Path) -> Cause | None:
    lines = _read_tail(log)
    tail = tuple(lines[-_TAIL_LINES:])
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        # The last exception line: a remote traceback quotes the original one at its end.
        named = [i for i in range(starts[-1], len(lines)) if _EXCEPTION_LINE.match(lines[i])]
        if named:
            reason = _with_continuation(lines, named[-1])
            return Cause(where, reason, log, tail, bool(_AFTERMATH.search(reason)))
    killed = [match for line in lines if (match := _TORCHRUN_SIGNAL.search(line))]
    if killed:
        number, pid = killed[0].groups()
        return Cause(
            where, f"process {pid} was {exit_words(-int(number))}", log, tail, number == str(int(signal.SIGTERM))
        )
    return None


def _with_continuation(lines: list[str], start: int) -> str:
    """An exception's message with its further lines, up to five."""
    message = [lines[start]]
    for line in lines[start + 1 : start + 5]:
        if line.startswith(("Traceback", "During handling", "The above exception", "[", "E0", "W0", "I0")):
            break
        message.append(line)
    return "\n".join(message)
