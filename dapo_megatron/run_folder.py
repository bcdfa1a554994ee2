"""The folder of one run: where it is, who may use it, and what becomes of an earlier run of the same name."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from dapo_megatron.config.errors import ConfigError
from dapo_megatron.config.load import to_yaml
from dapo_megatron.config.sections import RunConfig

RESOLVED_CONFIG = "resolved_config.yaml"
SERVICE_FILE = "service.json"
# Files that only exist once a run has produced something worth keeping.
_RESULTS = ("metrics.jsonl", "summary.json", "checkpoint_hf")


def run_folder(config: RunConfig) -> Path:
    """`<run.dir>/<run.name>`, absolute."""
    return Path(config.run.dir).absolute() / config.run.name


def prepare_run_folder(config: RunConfig, always_new: bool) -> tuple[Path, Path | None]:
    """Make the run's folder with `resolved_config.yaml` and `logs/`.

    An earlier run of the same name is never overwritten: its folder is renamed `<name>.1`, `<name>.2`, ...

    Args:
        always_new: move any non-empty folder. False keeps a folder without results, in which a trainer that was
            started first may already be waiting; what would mislead it (`service.json`) is removed.

    Returns:
        The folder, and where an earlier one went (None if there was none).

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = run_folder(config)
    moved = None
    try:
        if folder.is_dir() and any(folder.iterdir()) and (always_new or any((folder / r).exists() for r in _RESULTS)):
            moved = _free_name(folder)
            folder.rename(moved)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / SERVICE_FILE).unlink(missing_ok=True)
        (folder / RESOLVED_CONFIG).write_text(to_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigError("run folder", [f"run.dir, run.name: cannot write {folder}: {error}"]) from None
    return folder, moved


def _free_name(folder: Path) -> Path:
    number = 1
    while (candidate := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return candidate


class RunLock:
    """Held while a run lives, so that a second start of the same name is refused instead of moving its folder away.

    The lock is the kernel's (flock) and vanishes with the process, however that ends.
    """

    def __init__(self, config: RunConfig) -> None:
        folder = run_folder(config)
        self._path = folder.with_name(f".{folder.name}.lock")
        self._name = config.run.name

    def __enter__(self) -> RunLock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+")
        except OSError as error:
            raise ConfigError("run folder", [f"run.dir: cannot write {self._path.parent}: {error}"]) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            problem = f"run.name: a run {self._name!r} is active here (process {owner}); stop it or choose another name"
            raise ConfigError("run folder", [problem]) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Unlinked while held, so that nobody can hold a lock on a name that is gone.
        self._path.unlink(missing_ok=True)
        self._file.close()
