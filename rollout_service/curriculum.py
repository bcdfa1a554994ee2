"""Curriculum: a prompt that the model solves completely, several passes in a row, rests for some passes.

Dynamic sampling drops such a prompt anyway, but only after its samples were generated. A resting prompt is passed over
by the cursor and costs nothing. It comes back, because a model also forgets.
"""

from __future__ import annotations

from typing import Any

from rollout_service.config import CurriculumSection
from rollout_service.filters import Verdict


class Curriculum:
    """Who rests. Pure bookkeeping by prompt id and epoch; disabled, nobody rests.

    A prompt whose group came out `SOLVE_ALL` `solved_times` times in a row rests until `rest_epochs` whole epochs of the
    cursor have gone by. When it comes back, one more complete solution sends it to rest again; any other outcome makes
    it an ordinary prompt. At most `max_resting_share` of the prompts rest, and never all: a prompt that finds no place is
    sampled as before and asks again at its next complete solution.

    Args:
        prompts: number of prompts in an epoch.

    Attributes:
        limit: largest number of resting prompts.
    """

    def __init__(self, section: CurriculumSection, prompts: int) -> None:
        self._section = section
        self.limit = min(prompts - 1, int(section.max_resting_share * prompts + 1e-9)) if section.enable else 0
        self._epoch = 0
        self._solved: dict[str, int] = {}  # complete solutions in a row; prompts without one are left out
        self._rests_through: dict[str, int] = {}  # last epoch of the rest
        self._skipped = 0

    def skips(self, prompt_id: str, epoch: int) -> bool:
        """Whether the cursor, which stands in `epoch`, passes this prompt over. Epochs only grow."""
        if not self._section.enable:
            return False
        if epoch > self._epoch:
            self._epoch = epoch
            self._rests_through = {name: last for name, last in self._rests_through.items() if last >= epoch}
        resting = prompt_id in self._rests_through
        self._skipped += resting
        return resting

    def note(self, prompt_id: str, verdict: Verdict) -> None:
        """Learn how a prompt's group came out, judged by its scores."""
        if not self._section.enable:
            return
        if verdict is not Verdict.SOLVE_ALL:
            self._solved.pop(prompt_id, None)
            self._rests_through.pop(prompt_id, None)
            return
        solved = self._solved[prompt_id] = self._solved.get(prompt_id, 0) + 1
        has_place = prompt_id in self._rests_through or len(self._rests_through) < self.limit
        if solved >= self._section.solved_times and has_place:
            self._rests_through[prompt_id] = self._epoch + self._section.rest_epochs

    def resting(self) -> int:
        """Prompts that rest now."""
        return len(self._rests_through)

    def stats(self) -> dict[str, float]:
        """By metric name: prompts at rest now, and prompts passed over since the last `reset_stats`; empty if disabled."""
        if not self._section.enable:
            return {}
        return {
            "training/curriculum/resting": float(self.resting()),
            "training/curriculum/skipped": float(self._skipped),
        }

    def reset_stats(self) -> None:
        """Start counting anew (once a step)."""
        self._skipped = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "solved": dict(self._solved), "rests_through": dict(self._rests_through)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; a limit that was lowered since wakes those whose rest ends first."""
        self._epoch = state["epoch"]
        self._solved = dict(state["solved"])
        longest_first = sorted(state["rests_through"].items(), key=lambda item: -item[1])
        self._rests_through = dict(longest_first[: self.limit])
