"""Rewards: find the final answer in a response, compare it with the gold answer, shape the result.

`extraction` and `rules` are pure, `worker` and `pool` run a rule in killable processes, `overlong` turns a score
into the reward that the advantage uses. Importing this package is light: a worker's start-up time depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

REWARD_TIMEOUT = "reward_timeout"
REWARD_CRASH = "reward_crash"
REWARD_ERROR = "reward_error"


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one response.

    Attributes:
        acc: 1.0 right, 0.0 wrong. Meaningless when `error` is set.
        extracted: the final answer found in the response, None when it gives none.
        error: None, or the class of the fault that prevented a verdict: `reward_timeout` (the deadline passed and the
            worker was killed), `reward_crash` (the worker died), `reward_error` (the rule raised). A sample with an
            error was not scored; it must never be trained as wrong.
    """

    acc: float
    extracted: str | None
    error: str | None = None
