"""Weights & Biases. Never stops training: what fails is counted and reported once."""

from __future__ import annotations

import logging
import netrc
import os
import threading
from pathlib import Path
from typing import Any

from dapo_megatron.config.sections import WandbSection

logger = logging.getLogger(__name__)

# A network that swallows packets must not keep the trainer from ending.
FINISH_TIMEOUT_S = 60.0
INIT_TIMEOUT_S = 60.0


def resolve_mode(section: WandbSection) -> str:
    """`online`, `offline` or `off`. W&B's own variable WANDB_MODE wins; `auto` is online when a key is known."""
    from_environment = {"disabled": "off", "dryrun": "offline", "online": "online", "offline": "offline"}
    mode = from_environment.get(os.environ.get("WANDB_MODE", ""), section.mode)
    if mode == "auto":
        return "online" if _has_key() else "offline"
    return mode


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = (
        os.environ.get("WANDB_BASE_URL", "api.wandb.ai").removeprefix("https://").removeprefix("http://").split("/")[0]
    )
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbSink:
    """One W&B run, written into the run folder."""

    def __init__(self, section: WandbSection, run_name: str, run_dir: Path, config: dict[str, Any]) -> None:
        self.mode = resolve_mode(section)
        self.failures = 0
        self._run: Any = None
        if self.mode == "off":
            return
        try:
            import wandb

            self._run = wandb.init(
                project=section.project,
                entity=section.entity,
                name=run_name,
                dir=str(run_dir),
                config=config,
                mode="online" if self.mode == "online" else "offline",
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S),
            )
        except Exception as error:  # whatever W&B raises, training goes on without it
            self._failed("start", error)

    def log(self, step: int, metrics: dict[str, float | int | None]) -> None:
        """Send one step's metrics; missing values (null) are left out."""
        if self._run is None:
            return
        try:
            self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)
        except Exception as error:  # whatever W&B raises, training goes on without it
            self._failed("log", error)

    def close(self) -> None:
        """Flush and end W&B's process, within `FINISH_TIMEOUT_S`."""
        run, self._run = self._run, None
        if run is None:
            return
        finisher = threading.Thread(target=self._finish, args=(run,), daemon=True)
        finisher.start()
        finisher.join(FINISH_TIMEOUT_S)
        if finisher.is_alive():
            self._failed("finish", TimeoutError(f"no answer within {FINISH_TIMEOUT_S:.0f} s"))
        if self.failures > 1:
            logger.warning("W&B: %d calls failed; metrics.jsonl in the run folder is complete", self.failures)

    def _finish(self, run: Any) -> None:
        import wandb

        try:
            run.finish()
            # W&B keeps a process for further runs, which would outlive this one.
            wandb.teardown()
        except Exception as error:  # whatever W&B raises, training goes on without it
            self._failed("finish", error)

    def _failed(self, action: str, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("W&B could not %s (training goes on): %s: %s", action, type(error).__name__, error)
