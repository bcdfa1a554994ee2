"""Rank 0's calls to the engines during one attempt at a weight update.

Each engine gets its calls in the order of its script, from a thread of its own. The scripts of all engines name the same
groups and turns in the same order, so whichever publisher is late, no two engines wait for each other in different
broadcasts. That order is all the agreement that the publishers need: each of them sends its own buckets in turn, and an
engine takes the next one when it has loaded the last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollout_service.engine import EngineError
from rollout_service.weights_client import WeightsClient

logger = logging.getLogger(__name__)

Phase = Literal["connect", "begin", "send", "end"]

_PROBE_TIMEOUT_S = 10.0
_GRACE_S = 20.0  # for engines to notice that a broadcast was given up
_VICTIM = ("Failed to receive weights", "Failed to initialize custom process group")  # SGLang's words


@dataclass(frozen=True)
class Call:
    """One call of a script; `what` names it in errors."""

    phase: Phase
    what: str
    run: Callable[[WeightsClient], None]


@dataclass
class Progress:
    """How far one engine has come.

    Attributes:
        done: calls of its script that it has answered.
        error: why it stopped.
        finished: it is through with its script, or has stopped.
    """

    script: Sequence[Call]
    done: int = 0
    error: EngineError | None = None
    finished: bool = False
    failed_at: float = 0.0
    phase_ended: dict[Phase, float] = field(default_factory=dict)

    def count(self, phase: Phase) -> int:
        """Calls of `phase` that were answered."""
        return sum(call.phase == phase for call in self.script[: self.done])


@dataclass(frozen=True)
class Verdict:
    """What became of the engines of one attempt, by engine id: through, lost with a reason, or to be tried again."""

    reached: tuple[int, ...]
    lost: dict[int, str]
    again: tuple[int, ...]


class EngineCalls:
    """Runs the scripts of one attempt.

    Args:
        clients, scripts: by engine id.
        leave_groups: what an engine that failed is asked to leave, so that the publishers notice at once and let go of
            the other engines.
        on_failure: called from an engine's thread as soon as one has failed.
        timeout_s: longest time without an answer from any engine.
    """

    def __init__(
        self,
        clients: Mapping[int, WeightsClient],
        scripts: Mapping[int, Sequence[Call]],
        *,
        leave_groups: Sequence[str],
        on_failure: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._clients = clients
        self._leave_groups = leave_groups
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._last_answer = time.monotonic()
        self._crash: Exception | None = None
        self.progress = {engine: Progress(script) for engine, script in scripts.items()}
        for engine in scripts:
            # Daemons: a call to an engine that hangs must not keep this process alive.
            threading.Thread(target=self._run, args=(engine,), name=f"weights-engine-{engine}", daemon=True).start()

    def wait(self) -> Verdict:
        """Wait until every engine is through, has failed, or has kept silent for too long.

        Raises:
            Exception: what went wrong in a call's thread on this side of the connection.
        """
        give_up: float | None = None  # when to stop waiting for the rest, once something has gone wrong
        with self._changed:
            while not all(progress.finished for progress in self.progress.values()):
                self._changed.wait(0.05)
                now = time.monotonic()
                failed = [progress for progress in self.progress.values() if progress.error is not None]
                if give_up is None and (failed or now - self._last_answer > self._timeout_s):
                    # A group that is still coming about lets go of its members only after its own timeout.
                    connecting = any(progress.script[progress.done].phase == "connect" for progress in failed)
                    give_up = now + min(_GRACE_S, self._timeout_s) + (self._timeout_s if connecting else 0.0)
                    self._on_failure()
                if give_up is not None and now > give_up:
                    break
        if self._crash is not None:
            raise self._crash
        return self._judge()

    def phase_seconds(self, started: float) -> dict[str, float]:
        """Wall time of each phase, until the last engine was through with it; `started` is of `time.monotonic`."""
        seconds: dict[str, float] = {}
        phases: tuple[Phase, ...] = ("connect", "begin", "send", "end")
        for phase in phases:
            ends = [p.phase_ended[phase] for p in self.progress.values() if phase in p.phase_ended]
            if ends:
                seconds[phase] = max(0.0, max(ends) - started)
                started = max(started, max(ends))
        return seconds

    def _run(self, engine: int) -> None:
        progress, client = self.progress[engine], self._clients[engine]
        try:
            for call in progress.script:
                call.run(client)
                with self._changed:
                    progress.done += 1
                    progress.phase_ended[call.phase] = self._last_answer = time.monotonic()
        except EngineError as error:
            progress.failed_at = time.monotonic()
            with self._changed:
                progress.error = error
                self._last_answer = time.monotonic()
            self._on_failure()
            for name in self._leave_groups:
                try:
                    client.destroy_group(name)
                except EngineError as refusal:
                    logger.debug("engine %d was not in group %s: %s", engine, name, refusal)
        except Exception as error:  # handed to the waiting thread, which raises it
            self._crash = error
            self._on_failure()
        finally:
            with self._changed:
                progress.finished = True
                self._changed.notify_all()

    def _judge(self) -> Verdict:
        """Tell the engines that are at fault from those that only suffered with them."""
        reached, lost, victims = [], {}, {}
        for engine, progress in self.progress.items():
            error = progress.error
            if progress.done == len(progress.script):
                reached.append(engine)
                continue
            what = progress.script[progress.done].what
            if error is None:
                lost[engine] = (
                    f"{self._clients[engine].endpoint.name} did not answer {what} within {self._timeout_s:.0f} s"
                )
            elif not any(word in str(error) for word in _VICTIM) or not self._alive(engine):
                lost[engine] = f"{what}: {error}"
            else:
                victims[engine] = f"{what}: {error}"
        if victims and not lost:
            # Somebody is at fault. Leaving out the first to fail lets every attempt make progress.
            first = min(victims, key=lambda engine: self.progress[engine].failed_at)
            lost[first] = victims.pop(first)
        return Verdict(tuple(reached), lost, tuple(victims))

    def _alive(self, engine: int) -> bool:
        probe = WeightsClient(self._clients[engine].endpoint, _PROBE_TIMEOUT_S)
        try:
            probe.weight_version()
        except EngineError:
            return False
        finally:
            probe.close()
        return True
