"""Entry point of the trainer under torchrun: `torchrun --nproc-per-node 2 -m dapo_megatron.train CONFIG [a.b=c ...]`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(config_path: str, overrides: list[str]) -> None:
    """Run this rank until the last step.

    Args:
        config_path: YAML file; overrides: `a.b.c=value`.
    """
    from dapo_megatron.config.load import load_config
    from rollout_service.process_guard import PR_SET_PDEATHSIG, prctl

    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank must not outlive a torchrun that was killed
    config = load_config(Path(config_path), overrides)
    run_dir = Path(config.run.dir, config.run.name).resolve()

    from dapo_megatron.platform import current_platform

    platform = current_platform()

    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize, shutdown
    from dapo_megatron.observability.run_log import RunLog
    from dapo_megatron.resharder.resharder import Resharder
    from dapo_megatron.service_client import ServiceClient
    from dapo_megatron.trainer import Trainer

    layout = initialize(config.parallel, platform, config.run.seed)
    log = RunLog(config, run_dir, active=layout.rank == 0)
    resharder = None
    try:
        log.event("load_model", path=config.model.path, device=platform.describe())
        actor = Actor(config, read_architecture(config.model.path), layout, platform)
        actor.load_hf(config.model.path)
        log.event("wait_for_engines")
        service = ServiceClient(
            run_dir,
            rank=layout.rank,
            device=layout.device,
            start_timeout_s=config.ray.start_timeout_s + config.rollout.engine.startup_timeout_s,
        )
        resharder = Resharder(config, actor, service, platform, run_dir)
        Trainer(config, run_dir, actor, service, resharder, log).run()
    finally:
        if resharder is not None:
            resharder.close()
        log.close()
        shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
