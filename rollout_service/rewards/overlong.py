"""From a score to the reward that the advantage uses: right or wrong, plus the soft overlong punishment.

Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), with L = `max_response_length`, C = `overlong_buffer.len`
and a factor f:

    P(n) = 0                     n <= L - C
    P(n) = f (L - C - n) / C     L - C < n <= L
    P(n) = -f                    n > L

The length is the whole response in tokens, also of one generated in several parts.
"""

from __future__ import annotations

from rollout_service.config import OverlongBufferSection, RolloutSection
from rollout_service.rewards import Score


def overlong_penalty(length: int, max_response_length: int, buffer: OverlongBufferSection) -> float:
    """P(n) of the module docstring, in `[-penalty_factor, 0]`; 0 when the buffer is switched off.

    >>> overlong_penalty(48, 64, OverlongBufferSection(enable=True, len=32))
    -0.5
    """
    if not buffer.enable:
        return 0.0
    excess = length - (max_response_length - buffer.len)
    if excess <= 0:
        return 0.0
    return -min(excess / buffer.len, 1.0) * buffer.penalty_factor


def shape_reward(score: Score, length: int, rollout: RolloutSection) -> tuple[float, dict[str, float]]:
    """The shaped reward of one sample and its parts by name.

    Args:
        score: verdict of the reward pool.
        length: response length in tokens, the closing end-of-sequence id included.

    Returns:
        `(reward, details)`: the values of `details` (`acc_reward`, `overlong_penalty`, and one for each extra rule) sum
        up to the reward. A score between 0 and 1 lies proportionally between `reward.incorrect` and `reward.correct`.

    Raises:
        ValueError: the score carries an error. Such a sample has no reward and must be scored again.
    """
    if score.error is not None:
        raise ValueError(
            f"a sample with {score.error} was not scored and has no reward; score it again or drop its group"
        )
    settings = rollout.reward
    acc_reward = score.acc * settings.correct + (1.0 - score.acc) * settings.incorrect
    penalty = overlong_penalty(length, rollout.max_response_length, rollout.overlong_buffer)
    details = {"acc_reward": acc_reward, "overlong_penalty": penalty, **score.extras}
    return acc_reward + penalty + sum(score.extras.values()), details
