"""Dynamic sampling (DAPO section 3.2): a group whose samples all score the same teaches nothing and is filtered out.

The score compared is the raw `acc` by default. Filtering on the shaped reward lets all-wrong groups through whenever
their lengths differ, which rewards short wrong answers.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from enum import StrEnum

from rollout_service.config import FilterGroupsSection
from rollout_service.sample import Group

logger = logging.getLogger(__name__)

# Scores closer than this are the same: float noise of a weighted sum.
SCORE_NOISE = 1e-6
# The measured keep rate starts at 1 and needs some evidence to fall: so many kept groups are assumed beforehand.
PRIOR_GROUPS = 8
# Situations that nobody has asked for yet; older ones are forgotten.
_UNREAD_WARNINGS = 20


class FilterExhausted(RuntimeError):
    """Nearly every group is uninformative and the policy says `stop`."""


class Verdict(StrEnum):
    """What becomes of a group: `KEPT` is trained, the others are dropped and replaced."""

    KEPT = "kept"
    SOLVE_ALL = "solve_all"
    SOLVE_NONE = "solve_none"
    CONSTANT = "constant"  # equal scores that are neither all right nor all wrong


_COUNTED = (*Verdict, "accepted")


class GroupFilter:
    """Decides about one complete group at a time and watches the share of uninformative ones.

    Once the window of the last `window_groups` groups is full and at least `max_filtered_share` of it is
    uninformative, `policy` acts: `warn` says so once per window (log, `take_warnings`) and goes on, `stop` raises
    `FilterExhausted`, `accept` says so and keeps uninformative groups until the share falls. The share always counts
    what the scores say, not what was kept.
    """

    def __init__(self, section: FilterGroupsSection) -> None:
        self._section = section
        self._window: deque[Verdict] = deque(maxlen=section.window_groups)
        self._since_warning = section.window_groups
        self._kept: deque[bool] = deque(maxlen=section.window_groups)
        self._warnings: deque[str] = deque(maxlen=_UNREAD_WARNINGS)
        self._stats: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._acc: list[float] = []  # mean raw score of each group since the last reset

    def decide(self, group: Group) -> Verdict:
        """The verdict on a complete, scored group.

        Raises:
            ValueError: a sample has no score.
            FilterExhausted: the share is reached and the policy is `stop`.
        """
        verdict = self.classify(group)
        self._count(verdict)
        self._acc.append(sum(sample.acc for sample in group.samples) / len(group.samples))
        if not self._section.enable:
            return Verdict.KEPT
        self._window.append(verdict)
        self._since_warning += 1
        if verdict is not Verdict.KEPT and self._exhausted():
            verdict = self._act(verdict)
        self._kept.append(verdict is Verdict.KEPT)
        return verdict

    def _act(self, verdict: Verdict) -> Verdict:
        if self._section.policy == "stop":
            raise FilterExhausted(self._situation())
        if self._since_warning >= self._section.window_groups:
            self._since_warning = 0
            self._warnings.append(self._situation())
            logger.warning("%s", self._situation())
        if self._section.policy == "warn":
            return verdict
        self._count("accepted")
        return Verdict.KEPT

    def _count(self, name: str) -> None:
        self._stats[name] += 1
        self._totals[name] += 1

    def classify(self, group: Group) -> Verdict:
        """What the group's scores say, whatever the policy."""
        errors = [sample.error for sample in group.samples if sample.error is not None]
        if errors or not group.samples:
            raise ValueError(
                f"group {group.order} ({group.prompt_id}) is not completely scored: {errors or 'no samples'}"
            )
        scores = [getattr(sample, self._section.metric) for sample in group.samples]
        accs = [sample.acc for sample in group.samples]
        if not all(map(math.isfinite, scores + accs)):
            raise ValueError(f"group {group.order} ({group.prompt_id}) has a score that is not finite: {scores}")
        if max(scores) - min(scores) > SCORE_NOISE:
            return Verdict.KEPT
        if min(accs) >= 1.0 - SCORE_NOISE:
            return Verdict.SOLVE_ALL
        if max(accs) <= SCORE_NOISE:
            return Verdict.SOLVE_NONE
        return Verdict.CONSTANT

    def filtered_share(self) -> float:
        """Share of uninformative groups among the last `window_groups`; 0 before the first."""
        if not self._window:
            return 0.0
        return sum(verdict is not Verdict.KEPT for verdict in self._window) / len(self._window)

    def keep_rate(self) -> float:
        """Share of kept groups among the last `window_groups`, from above: 1 before the first, never 0."""
        return (sum(self._kept) + PRIOR_GROUPS) / (len(self._kept) + PRIOR_GROUPS)

    def stats(self) -> dict[str, float]:
        """By metric name, since the last `reset_stats`: counts of verdicts (`accepted` ones were let through by the policy),
        and `acc`, the mean raw score of all finished groups, dropped ones included (left out when there was none).
        """
        stats = {f"training/filter_groups/{name}": float(self._stats[name]) for name in _COUNTED}
        stats["training/filter_groups/filtered_share"] = self.filtered_share()
        if self._acc:
            stats["training/filter_groups/acc"] = sum(self._acc) / len(self._acc)
        return stats

    def totals(self) -> dict[str, float]:
        """Counts by metric name since the start."""
        return {f"training/filter_groups/{name}": float(self._totals[name]) for name in _COUNTED}

    def reset_stats(self) -> None:
        """Start counting anew (once a step). The window and the totals stay."""
        self._stats.clear()
        self._acc.clear()

    def take_warnings(self) -> list[str]:
        """What the policy had to say since the last call, oldest first; equal words once."""
        warnings = list(dict.fromkeys(self._warnings))
        self._warnings.clear()
        return warnings

    def words(self) -> str:
        """The counts since the last reset, and what is probably wrong once `policy` acts; for an error message."""
        counts = ", ".join(f"{self._stats[name]} {name}" for name in _COUNTED)
        return f"{counts}. {self._situation()}" if self._exhausted() else counts

    def _exhausted(self) -> bool:
        full = len(self._window) == self._section.window_groups
        return full and self.filtered_share() >= self._section.max_filtered_share

    def _situation(self) -> str:
        counts = Counter(self._window)
        n = len(self._window)
        advice = {
            Verdict.SOLVE_NONE: "the task is too hard for the model, the answers are cut (rollout.max_response_length), "
            "or the answer format does not match rollout.reward.rule",
            Verdict.SOLVE_ALL: "the task is too easy for the model",
            Verdict.CONSTANT: "rollout.filter_groups.metric gives all samples the same partial score",
        }
        cause = max(advice, key=lambda verdict: counts[verdict])
        return (
            f"{n - counts[Verdict.KEPT]} of the last {n} groups taught nothing: {counts[Verdict.SOLVE_NONE]} all wrong, "
            f"{counts[Verdict.SOLVE_ALL]} all right, {counts[Verdict.CONSTANT]} constant; {counts[Verdict.KEPT]} kept. "
            f"Probably {advice[cause]}. rollout.filter_groups.policy={self._section.policy}: `warn` goes on sampling, "
            f"`stop` ends the run, `accept` trains on such groups."
        )
