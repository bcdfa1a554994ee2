"""Rewards: find the final answer in a response, compare it with the gold answer, shape the result.

`extraction` and `rules` are pure, `worker` and `pool` run a rule in killable processes, `async_rule` and `http_rule`
run rules that wait for others, `scorer` combines them, `overlong` turns a score into the reward that the advantage
uses. Importing this package is light: a worker's start-up time depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REWARD_TIMEOUT = "reward_timeout"
REWARD_CRASH = "reward_crash"
REWARD_ERROR = "reward_error"
REWARD_HTTP = "reward_http"


class RewardPoolError(RuntimeError):
    """Scoring itself cannot work: its processes do not start, or do not answer."""


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one response.

    Attributes:
        acc: 1.0 right, 0.0 wrong. Meaningless when `error` is set.
        extracted: the final answer found in the response, None when it gives none.
        error: None, or the class of the fault that prevented a verdict: `reward_timeout` (the deadline passed),
            `reward_crash` (the worker died), `reward_error` (the rule raised or broke its contract), `reward_http`
            (the reward server could not be reached or answered nonsense). A sample with an error was not scored; it
            must never be trained as wrong.
        extras: weighted scores of `rollout.reward.extra_rules` by rule, which the reward adds to the verdict.
    """

    acc: float
    extracted: str | None
    error: str | None = None
    extras: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Item:
    """What a rule may look at.

    Attributes:
        gold: gold answer as text.
        response: decoded response, special tokens left out.
        truncated: the response ended at its length limit.
        prompt: the prompt's text.
    """

    gold: str
    response: str
    truncated: bool
    prompt: str = ""
