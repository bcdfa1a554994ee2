"""`dapo reward`: the service's scoring, on a file of recorded responses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout_service.config import RewardSection
from rollout_service.rewards import RewardPoolError
from rollout_service.rewards.contract import ContractError
from rollout_service.rewards.score_file import ScoreFileError, Summary, score_file

EXIT_CONFIG = 2


def score(file: Path, out: Path | None, **settings: Any) -> int:
    """Score a file; verdicts to `out` or standard output, the summary to standard error.

    Returns:
        0, 1 when a line has no verdict, 2 when nothing could be scored.
    """
    try:
        reward = RewardSection(**settings)
        summary = _score(file, reward, out)
    except ValidationError as error:
        for problem in error.errors():
            print(f"error: --{'-'.join(map(str, problem['loc']))}: {problem['msg']}", file=sys.stderr)
        return EXIT_CONFIG
    except (ScoreFileError, ContractError, RewardPoolError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    print(summary.text(), file=sys.stderr)
    return 1 if summary.errors else 0


def _score(file: Path, reward: RewardSection, out: Path | None) -> Summary:
    if out is None:
        return score_file(file, reward, sys.stdout)
    # A file of that name is complete or not there.
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            summary = score_file(file, reward, stream)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return summary
