"""The one error of the configuration."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """All problems found in one place, each a sentence that names the key, file or row and the way out.

    Attributes:
        source: what was read, for example `configs/quickstart.yaml`.
        problems: at least one line.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {problem}" for problem in self.problems))
