"""The terminal's view of a run: a live panel on a terminal, one calm line a step elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dapo_megatron.observability.events import event_text
from dapo_megatron.observability.run_state import STEP_MARK, RunState


class RunView(Protocol):
    """What the launcher calls; `update` several times a second."""

    def __enter__(self) -> RunView: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self) -> None: ...


def make_view(run_dir: Path, total_steps: int, title: str, console: Console, plain: bool) -> RunView:
    """The live panel on a terminal, else (or when `plain` is asked for) plain lines."""
    if plain or not console.is_terminal:
        return PlainView(run_dir, total_steps, console)
    return LiveView(run_dir, total_steps, title, console)


class PlainView:
    """One line for each step, phase, evaluation and warning, for logs and pipes."""

    def __init__(self, run_dir: Path, total_steps: int, console: Console) -> None:
        self.state = RunState(run_dir, total_steps)
        self._console = console

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()

    def update(self) -> None:
        events, metrics = self.state.poll()
        lines = [(float(e.get("time") or 0.0), event_text(e)) for e in events]
        for line in metrics:
            moment = float(line.get("time") or 0.0)
            if STEP_MARK in line:
                lines.append((moment, step_line(line, self.state)))
            if evaluated := evaluation_line(line):
                lines.append((moment, evaluated))
        for _, text in sorted(lines, key=lambda item: item[0]):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A panel with progress, the latest step's numbers, totals and warnings."""

    def __init__(self, run_dir: Path, total_steps: int, title: str, console: Console) -> None:
        self.state = RunState(run_dir, total_steps)
        self._title = title
        # No refresh thread: the launcher forks processes, and it redraws often enough itself.
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        self._live.stop()

    def update(self) -> None:
        self.state.poll()
        self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        state = self.state
        waited = duration(time.time() - state.phase_since)
        head = Text.assemble((state.phase, "bold"), (f"  for {waited}", "dim"))
        eta = state.eta_s()
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            f"step {state.step}/{state.total_steps}",
            ProgressBar(total=state.total_steps, completed=state.step, width=36),
            f"elapsed {duration(time.time() - state.started)}",
            "" if eta is None else f"about {duration(eta)} left",
        )
        parts: list[RenderableType] = [head, progress]
        if state.step:
            parts.append(self._numbers())
        parts += [Text(f"! {message}", style="yellow") for message in state.remarks[-3:]]
        return Panel(Group(*parts), title=escape(self._title), title_align="left", border_style="blue")

    def _numbers(self) -> Table:
        state = self.state
        v = state.value
        grid = Table.grid(padding=(0, 3))
        for style in ("cyan", "", "cyan", ""):
            grid.add_column(style=style, no_wrap=True)
        rows = [
            ("reward", _num(v("critic/rewards/mean"), "+.3f"), "accuracy", _num(v("critic/score/mean"), ".3f")),
            ("groups kept", _group_counts(state.latest), "in all", _group_counts(_as_filter_metrics(state.totals))),
            ("response", _lengths(state), "staleness", _staleness(state)),
            ("entropy", _num(v("actor/entropy"), ".3f"), "grad norm", _num(v("actor/grad_norm"), ".3f")),
            ("clipped tokens", _num(v("actor/pg_clipfrac"), ".2%"), "log-prob gap", _gap(state.latest)),
            ("speed", _num(v("perf/throughput"), ",.0f", " tokens/s"), "step", _times(state.latest)),
        ]
        for row in rows:
            grid.add_row(*row)
        for name, value in sorted(state.evaluations.items()):
            grid.add_row(name.removeprefix("val-core/"), f"{value:.3f}")
        return grid


def step_line(line: dict[str, Any], state: RunState) -> str:
    """One training step as one line of text."""
    width = len(str(state.total_steps))
    eta = state.eta_s()
    parts = [
        f"step {int(line['step']):>{width}}/{state.total_steps}",
        f"reward {_num(line.get('critic/rewards/mean'), '+.3f')} acc {_num(line.get('critic/score/mean'), '.3f')}",
        f"groups {_group_counts(line)}",
        f"response {_num(line.get('response_length/mean'), '.1f')} tok",
        f"staleness {_num(line.get('training/off_policy/staleness/mean'), '.2f')}",
        f"gap {_gap(line)}",
        f"{_times(line)}",
        _num(line.get("perf/throughput"), ",.0f", " tok/s"),
    ]
    if eta is not None:
        parts.append(f"{duration(eta)} left")
    return " | ".join(parts)


def evaluation_line(line: dict[str, Any]) -> str:
    """Accuracies in a line of metrics as text: `  heldout/greedy/acc/mean@1 0.930, ...`; empty when there are none."""
    prefix = "val-core/"
    values = [(name.removeprefix(prefix), value) for name, value in line.items() if name.startswith(prefix)]
    return "  " + ", ".join(f"{name} {_num(value, '.3f')}" for name, value in values) if values else ""


def duration(seconds: float) -> str:
    """`7 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _num(value: Any, spec: str, unit: str = "") -> str:
    return format(value, spec) + unit if isinstance(value, int | float) else "-"


def _as_filter_metrics(totals: dict[str, float]) -> dict[str, Any]:
    return {f"training/filter_groups/{outcome}": value for outcome, value in totals.items()}


def _group_counts(line: dict[str, Any]) -> str:
    """`16 kept, 3 all right, 1 all wrong`; kinds that did not occur are left out, kept is always named."""
    words = {
        "kept": "kept",
        "solve_all": "all right",
        "solve_none": "all wrong",
        "constant": "same score",
        "accepted": "uninformative let through",
    }
    shown = []
    for outcome, word in words.items():
        value = line.get(f"training/filter_groups/{outcome}")
        if isinstance(value, int | float) and (value or outcome == "kept"):
            shown.append(f"{value:.0f} {word}")
    return ", ".join(shown) or "-"


def _lengths(state: RunState) -> str:
    mean, longest = state.value("response_length/mean"), state.value("response_length/max")
    return f"{_num(mean, '.1f')} mean, {_num(longest, '.0f')} max tokens"


def _staleness(state: RunState) -> str:
    mean = state.value("training/off_policy/staleness/mean")
    return f"{_num(mean, '.2f')} mean, {_num(state.value('training/off_policy/staleness/max'), '.0f')} max"


def _gap(line: dict[str, Any]) -> str:
    return _num(line.get("rollout_corr/logprob_abs_diff"), ".1e")


def _times(line: dict[str, Any]) -> str:
    """`3.1 s (wait 1.2, train 1.0, sync 0.1)`."""

    def seconds(*phases: str) -> float:
        return sum(float(line.get(f"timing_s/{phase}") or 0.0) for phase in phases)

    parts = f"wait {seconds('wait'):.1f}, train {seconds('old_log_prob', 'update_actor'):.1f}, sync {seconds('update_weights'):.1f}"
    return f"{_num(line.get(STEP_MARK), '.1f', ' s')} ({parts})"
