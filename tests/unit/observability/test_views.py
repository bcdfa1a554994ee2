"""What a run shows: state from files, plain lines, the live panel, the closing table."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dapo_megatron.observability.events import EVENTS_FILE, EventLog
from dapo_megatron.observability.jsonl import JsonlWriter, read_jsonl
from dapo_megatron.observability.live import LiveView, PlainView, duration, make_view
from dapo_megatron.observability.run_state import RunState
from dapo_megatron.observability.sinks import METRICS_FILE
from dapo_megatron.observability.summary import SUMMARY_KEYS, read_summary, summary_table, write_summary


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "time": 1000.0 + number,
        "critic/rewards/mean": 0.25,
        "critic/score/mean": 0.625,
        "response_length/mean": 14.25,
        "training/off_policy/staleness/mean": 0.5,
        "training/filter_groups/kept": 4,
        "training/filter_groups/solve_none": 3,
        "rollout_corr/logprob_abs_diff": 3.2e-6,
        "timing_s/step": 2.0,
        "timing_s/wait": 1.25,
        "timing_s/old_log_prob": 0.25,
        "timing_s/update_actor": 0.25,
        "timing_s/update_weights": 0.125,
        "perf/throughput": 1234.5,
        **more,
    }


def text_console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=200), stream


def test_plain_view_prints_one_line_a_step_in_the_order_of_time(tmp_path: Path) -> None:
    console, stream = text_console()
    events, metrics = JsonlWriter(tmp_path / EVENTS_FILE), JsonlWriter(tmp_path / METRICS_FILE)
    events.write({"time": 900.0, "event": "load_model", "device": "cpu"})
    events.write({"time": 2000.0, "event": "export", "path": "x"})
    metrics.write({"step": 0, "time": 950.0, "val-core/dev/acc/mean@1": 0.2})
    metrics.write(step(1))
    with PlainView(tmp_path, 4, console) as view:
        view.update()
        metrics.write(step(2))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading the model: device cpu"
    assert lines[1] == "  dev/acc/mean@1 0.200"
    assert lines[2] == (
        "step 1/4 | reward +0.250 acc 0.625 | groups 4 kept, 3 all wrong | response 14.2 tok | staleness 0.50 | "
        "gap 3.2e-06 | 2.0 s (wait 1.2, train 0.5, sync 0.1) | 1,234 tok/s | 6 s left"
    )
    assert lines[3] == "writing the Hugging Face checkpoint: path x"
    assert lines[4].startswith("step 2/4 |")
    assert len(lines) == 5


def test_state_sums_groups_and_judges_the_time_left_by_late_steps(tmp_path: Path) -> None:
    state = RunState(tmp_path, total_steps=30)
    assert state.eta_s() is None
    with JsonlWriter(tmp_path / METRICS_FILE) as metrics:
        for number in range(1, 21):
            metrics.write(step(number) | {"timing_s/step": 100.0 if number <= 10 else 3.0})
    state.poll()
    assert state.totals["kept"] == 80
    assert state.totals["solve_none"] == 60
    assert state.eta_s() == pytest.approx(10 * 3.0)
    assert state.phase == "training"


def test_missing_values_are_shown_as_missing(tmp_path: Path) -> None:
    console, stream = text_console()
    with JsonlWriter(tmp_path / METRICS_FILE) as metrics:
        metrics.write({"step": 1, "time": 1.0, "timing_s/step": None, "critic/rewards/mean": None})
    with PlainView(tmp_path, 2, console):
        pass
    assert stream.getvalue().startswith("step 1/2 | reward - acc - | groups - |")


def test_live_panel_shows_step_totals_and_warnings(tmp_path: Path) -> None:
    console, stream = text_console()
    log = EventLog(tmp_path)
    log.emit("warning", message="98% of the groups were all wrong")
    log.close()
    with JsonlWriter(tmp_path / METRICS_FILE) as metrics:
        metrics.write(step(1) | {"val-core/dev/acc/mean@1": 0.75})
        metrics.write(step(2))
    view = LiveView(tmp_path, 5, "toy: TP 2", console)
    view.state.poll()
    console.print(view.render())
    shown = stream.getvalue()
    for words in ("toy: TP 2", "step 2/5", "8 kept, 6 all wrong", "98% of the groups", "dev/acc/mean@1", "0.750"):
        assert words in shown


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    console, _ = text_console()
    assert isinstance(make_view(tmp_path, 3, "t", console, plain=False), PlainView)
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(make_view(tmp_path, 3, "t", terminal, plain=False), LiveView)
    assert isinstance(make_view(tmp_path, 3, "t", terminal, plain=True), PlainView)


def test_an_undeclared_event_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    with pytest.raises(KeyError, match="dancing"):
        log.emit("dancing")
    log.close()
    assert read_jsonl(tmp_path / EVENTS_FILE) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def full_summary() -> dict[str, Any]:
    return {
        "accuracy_before_sampled": 0.21,
        "accuracy_before_greedy": 0.5,
        "accuracy_after_sampled": 0.93,
        "accuracy_after_greedy": float("nan"),
        "steps": 60,
        "wall_time_s": 263.4,
        "tokens_per_s": 2345.6,
        "staleness_mean": 0.95,
        "staleness_max": 1.0,
        "weight_sync_s_median": 0.051,
        "logprob_abs_diff_max": 4.1e-6,
        "phases_s": {"wait": 100.0, "update_actor": 120.5, "probe": 0.0},
    }


def test_summary_has_every_key_and_its_table_every_number(tmp_path: Path) -> None:
    write_summary(tmp_path, full_summary())
    summary = read_summary(tmp_path)
    assert summary is not None
    assert set(summary) == set(SUMMARY_KEYS)
    assert summary["accuracy_after_greedy"] is None
    console, stream = text_console()
    console.print(summary_table(tmp_path, summary))
    shown = stream.getvalue()
    for words in (
        "0.210 -> 0.930",
        "0.500 -> -",
        "4 min 23 s",
        "2,346 tokens/s",
        "0.95 / 1 versions",
        "0.051 s",
        "4.10e-06",
        "update_actor 120.5 s, wait 100.0 s",
    ):
        assert words in shown
    assert "probe" not in shown


def test_an_incomplete_summary_is_refused(tmp_path: Path) -> None:
    summary = full_summary()
    del summary["phases_s"]
    with pytest.raises(KeyError, match="phases_s"):
        write_summary(tmp_path, summary)
    assert read_summary(tmp_path) is None
