"""Runs the launcher with stand-ins for the service and the trainer: `launch_driver.py CONFIG SERVICE.py TRAINER.py|rank:MODULE.py`.

A stand-in gets the resolved configuration's path as its argument. `rank:` puts the trainer under the real torchrun.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from dapo_megatron import launch
from dapo_megatron.config import RunConfig, load_config


def main(config_path: str, service: str, trainer: str) -> int:
    real_torchrun = launch.torchrun_command

    def torchrun(config: RunConfig, path: Path, log_dir: Path) -> list[str]:
        if trainer.startswith("rank:"):
            command = real_torchrun(config, path, log_dir)
            return [*command[: command.index("dapo_megatron.train") - 1], trainer.removeprefix("rank:"), str(path)]
        return [sys.executable, trainer, str(path)]

    launch.service_command = lambda path: [sys.executable, service, str(path)]
    launch.torchrun_command = torchrun
    config = load_config(Path(config_path))
    return launch.launch(config, True, Console(width=200), Console(stderr=True, width=200))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
