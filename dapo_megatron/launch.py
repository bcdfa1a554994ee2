"""`dapo run`: the rollout service and the trainer on one machine, watched until both have ended. `dapo train`: the
trainer alone, with a service that `dapo rollout` runs in another terminal.

With `dapo run` both are started at once: the trainer imports and loads while the engines start, then waits for `service.json` in the
run folder. Whatever happens (success, failure of either, Ctrl-C, SIGTERM, SIGKILL of this process), no process of
the run is left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from dapo_megatron.config.errors import ConfigError
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.failure import Cause, exit_words, find_cause, service_sources, tail_lines, trainer_sources
from dapo_megatron.guarded_process import GuardedProcess
from dapo_megatron.observability.live import make_view
from dapo_megatron.observability.summary import read_summary, summary_table
from dapo_megatron.run_folder import RESOLVED_CONFIG, SERVICE_FILE, RunLock, prepare_run_folder, run_folder

POLL_S = 0.25
# After SIGTERM, before SIGKILL: the service promises to have ended its processes within this time.
GRACE_S = 15.0
# When one process fails the other often follows; waiting shows which of the two holds the cause.
ATTRIBUTION_S = 3.0
# The trainer ends the service before it writes its last files.
TRAINER_AFTER_SERVICE_S = 300.0

EXIT_FAILURE = 1


def child_environment(config: RunConfig) -> dict[str, str]:
    """Environment of the run's processes: one thread each unless the user says otherwise, offline for local files."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONUNBUFFERED", "1")
    if all(Path(path).is_absolute() for path in config.data.train):
        env.setdefault("HF_HUB_OFFLINE", "1")
    # All processes meet on the loopback device; a name meant for a cluster's network would break that.
    env.pop("GLOO_SOCKET_IFNAME", None)
    return env


def service_command(config_path: Path) -> list[str]:
    """The rollout service of a prepared run folder."""
    return [sys.executable, "-m", "dapo_megatron.cli", "rollout", "--prepared", str(config_path)]


def torchrun_command(config: RunConfig, config_path: Path, log_dir: Path) -> list[str]:
    """The trainer under torchrun, on this machine. Overrides of the configuration may follow."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", "1", "--nproc-per-node", str(config.parallel.nproc_per_node), "--max-restarts", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-id", config.run.name]
    command += ["--log-dir", str(log_dir), "--redirects", "3"]
    return [*command, "-m", "dapo_megatron.train", str(config_path)]


def launch(config: RunConfig, plain: bool, console: Console, errors: Console) -> int:
    """Run a checked configuration to its end.

    Returns:
        0, 1 after a failure, 128 + n after signal n.

    Raises:
        ConfigError: the run needs several machines, its folder cannot be written, or a run of its name is active.
    """
    _require_one_machine(config)
    with RunLock(config):
        folder, moved = prepare_run_folder(config, always_new=True)
        if moved is not None:
            console.print(f"an earlier run of this name was kept as {moved.name}", markup=False, highlight=False)
        config_path = folder / RESOLVED_CONFIG
        trainer = torchrun_command(config, config_path, folder / "logs" / "ranks")
        return _Launch(config, folder, service_command(config_path), trainer, plain, console, errors).run()


def launch_trainer(
    config: RunConfig, config_path: Path, overrides: Sequence[str], plain: bool, console: Console, errors: Console
) -> int:
    """Run the trainer of a checked configuration with a rollout service that runs already or is about to.

    Waits for `service.json` in the run folder, because an earlier run's folder is moved away by `dapo rollout`.

    Returns:
        0, 1 after a failure, 128 + n after signal n.

    Raises:
        ConfigError: the run needs several machines.
    """
    _require_one_machine(config)
    folder = run_folder(config)
    if not _service_announced(folder):
        console.print(
            f"waiting for the rollout service (dapo rollout {config_path})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    deadline = time.monotonic() + config.ray.start_timeout_s
    while not _service_announced(folder):
        if time.monotonic() > deadline:
            wait = f"within ray.start_timeout_s={config.ray.start_timeout_s:g}"
            errors.print(f"error: no rollout service announced itself in {folder} {wait}", markup=False, soft_wrap=True)
            return EXIT_FAILURE
        time.sleep(POLL_S)
    trainer = [*torchrun_command(config, config_path, folder / "logs" / "ranks"), *overrides]
    return _Launch(config, folder, None, trainer, plain, console, errors).run()


def _require_one_machine(config: RunConfig) -> None:
    if config.parallel.nnodes > 1:
        problem = (
            f"parallel.nnodes={config.parallel.nnodes}: this command starts one machine; run `dapo rollout` on one and "
            "`torchrun --nnodes ... -m dapo_megatron.train CONFIG` on each"
        )
        raise ConfigError("launch", [problem])


def _service_announced(folder: Path) -> bool:
    """Whether `service.json` is there and not the leftover of a service that was killed on this machine."""
    try:
        content = json.loads((folder / SERVICE_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return content.get("host") != socket.gethostname() or psutil.pid_exists(int(content["pid"]))


@dataclass
class _Launch:
    config: RunConfig
    folder: Path
    service_command: list[str] | None
    trainer_command: list[str]
    plain: bool
    console: Console
    errors: Console
    signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        logs = self.folder / "logs"
        env = child_environment(self.config)
        previous = self._install_signal_handlers()
        service = trainer = None
        try:
            if self.service_command is not None:
                service = GuardedProcess("the rollout service", self.service_command, env, logs / "rollout.log")
            trainer = GuardedProcess("the trainer", self.trainer_command, env, logs / "trainer.log")
            return self._watch(service, trainer)
        finally:
            for process in (trainer, service):
                if process is not None:
                    process.kill()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _install_signal_handlers(self) -> dict[int, Any]:
        def note(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        return {number: signal.signal(number, note) for number in numbers}

    def _watch(self, service: GuardedProcess | None, trainer: GuardedProcess) -> int:
        par = self.config.parallel
        title = (
            f"{self.config.run.name}: {Path(self.config.model.path).name}, TP {par.tensor_model_parallel_size} "
            f"PP {par.pipeline_model_parallel_size} DP {par.data_parallel_size}, "
            f"{self.config.rollout.prompts_per_step} prompts x {self.config.rollout.n_samples_per_prompt} samples"
        )
        self.console.print(f"run folder: {self.folder}", markup=False, highlight=False, soft_wrap=True)
        view = make_view(self.folder, self.config.trainer.total_steps, title, self.console, self.plain)
        first: GuardedProcess | None = None
        with view:
            while first is None and not self.signals:
                view.update()
                first = self._first_to_fail(service, trainer, view.update)
                if first is None and trainer.poll() == 0:
                    break
                time.sleep(POLL_S)
            if first is not None and not self.signals:
                other = service if first is trainer else trainer
                if other is not None:
                    other.wait(ATTRIBUTION_S)
        if self.signals:
            return self._interrupted(service, trainer)
        if first is not None:
            return self._failed(first, service, trainer)
        self._stop(service)
        return self._closing()

    def _first_to_fail(
        self, service: GuardedProcess | None, trainer: GuardedProcess, update: Callable[[], None]
    ) -> GuardedProcess | None:
        trainer_status = trainer.poll()
        service_status = service.poll() if service is not None else None
        if trainer_status:
            return trainer
        if service is not None and trainer_status is None and service_status is not None:
            if service_status == 0:
                # An orderly end comes from the trainer's last call; it still writes its results.
                deadline = time.monotonic() + TRAINER_AFTER_SERVICE_S
                while trainer.poll() is None and time.monotonic() < deadline and not self.signals:
                    update()
                    time.sleep(POLL_S)
                return None if trainer.poll() == 0 or self.signals else trainer
            return service
        return None

    def _stop(self, *started: GuardedProcess | None) -> None:
        """SIGTERM to all at once, then SIGKILL to what is left after the grace (or at once on a further signal)."""
        processes = [process for process in started if process is not None]
        for process in processes:
            process.terminate()
        told = len(self.signals)
        deadline = time.monotonic() + GRACE_S
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline and len(self.signals) == told:
            time.sleep(0.05)
        for process in processes:
            process.kill()

    def _interrupted(self, service: GuardedProcess | None, trainer: GuardedProcess) -> int:
        number = self.signals[0]
        words = "interrupted" if number == signal.SIGINT else f"{signal.Signals(number).name} received"
        self.errors.print(f"{words}: stopping the run ...", markup=False, highlight=False)
        self._stop(trainer, service)
        self.errors.print(f"stopped; what was done so far lies in {self.folder}", markup=False, highlight=False)
        return 128 + number

    def _failed(self, first: GuardedProcess, service: GuardedProcess | None, trainer: GuardedProcess) -> int:
        # Both states are taken before anything is stopped: afterwards every process has "failed".
        statuses = {process.name: process.poll() for process in (service, trainer) if process is not None}
        self._stop(trainer, service)
        cause = self._cause(first.name, statuses)
        ended = ", ".join(f"{name}: {exit_words(status)}" for name, status in statuses.items() if status is not None)
        if cause is None:
            log, tail = first.log, tail_lines(first.log)
            headline = f"{first.name} ended without saying why"
        else:
            log, tail = cause.log, cause.tail
            headline = f"{cause.where} failed: {cause.reason}"
        self.errors.print(f"[bold red]error:[/bold red] {escape(headline)}", highlight=False, soft_wrap=True)
        self.errors.print(f"  ({ended or f'{first.name} did not end in time'})", markup=False, highlight=False)
        self.errors.print(f"  log: {log}", markup=False, highlight=False, soft_wrap=True)
        for line in tail:
            self.errors.print(f"  | {line}", markup=False, highlight=False, soft_wrap=True, style="dim")
        return EXIT_FAILURE

    def _cause(self, first: str, statuses: dict[str, int | None]) -> Cause | None:
        """The cause in the logs of the process that failed first; if that only reports another's end, in the other's."""
        logs = self.folder / "logs"
        sources = {"the rollout service": service_sources(logs), "the trainer": trainer_sources(logs)}
        cause = find_cause(sources.pop(first))
        for name, others in sources.items():
            its_cause = find_cause(others)
            blames_other = cause is not None and cause.is_aftermath
            ended_alike = cause is None and statuses.get(name) is not None
            if its_cause is not None and not its_cause.is_aftermath and (blames_other or ended_alike):
                return its_cause
        return cause

    def _closing(self) -> int:
        summary = read_summary(self.folder)
        if summary is None:
            message = f"error: the trainer ended without writing summary.json; see {self.folder / 'logs'}"
            self.errors.print(message, markup=False, highlight=False, soft_wrap=True)
            return EXIT_FAILURE
        self.console.print(summary_table(self.folder, summary))
        return 0
