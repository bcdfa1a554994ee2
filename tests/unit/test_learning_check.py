"""The figure and the table of the learning check, from results made up here. The check itself takes many minutes."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import learning_check

    yield learning_check
    for name in ("learning_check", "svg_chart"):
        sys.modules.pop(name, None)


def results(check: Any, steps: int = 12) -> dict[str, Any]:
    def run(shift: float) -> dict[str, Any]:
        curves: dict[str, list[float | None]] = {
            column: [shift + 0.1 * math.log(1 + step) for step in range(steps)] for column in check.CURVES
        }
        curves["entropy"][3] = None
        return {"curves": curves, "accuracy_after_sampled": shift, "accuracy_after_greedy": None, "wall_time_s": 1.0}

    variants = {name: {"overrides": [], "runs": {"1": run(0.1), "2": run(0.3)}} for name in check.VARIANTS}
    return {"seeds": [1, 2], "variants": variants}


def test_every_variant_switches_parts_off_by_keys_that_exist(check: Any) -> None:
    from dapo_megatron.config.load import load_config

    for name, (_, overrides) in check.VARIANTS.items():
        config = load_config(ROOT / check.CONFIG, overrides)
        off = [
            config.algorithm.clip_ratio_high == config.algorithm.clip_ratio_low,
            config.algorithm.loss_agg_mode != "token-mean",
            not config.rollout.filter_groups.enable,
            not config.rollout.overlong_buffer.enable,
        ]
        assert sum(off) == {"dapo": 0, "none": 4}.get(name, 1)


def test_every_curve_is_a_declared_metric(check: Any) -> None:
    from dapo_megatron.observability.metrics import is_declared

    assert all(is_declared(metric) for metric in check.CURVES.values())


def test_the_figure_holds_a_line_for_each_variant_in_each_panel(check: Any) -> None:
    root = ElementTree.fromstring(check.draw(results(check)))
    lines = [node.get("points", "").split() for node in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in lines] == [12] * 12
    heights = [[float(point.split(",")[1]) for point in points] for points in lines]
    assert all(line == sorted(line, reverse=True) for line in heights)  # growing values climb: y points down


def test_smoothing_is_the_mean_of_the_last_steps_without_gaps(check: Any) -> None:
    assert check.smooth([1.0, 3.0, None, 5.0, 7.0, 9.0]) == [1.0, 2.0, 2.0, 3.0, 4.0, 6.0]


def test_the_table_averages_seeds(check: Any) -> None:
    row = check.table(results(check)).splitlines()[2]
    assert row.startswith("| DAPO | 0.200 | - | ")


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.2, 0.93), (-3.0, 4.5), (0.999, 1.0), (5.0, 5.0), (0.0, 0.0), (1e-7, 3e-7), (0, 9.9)],
)
def test_axis_ticks_enclose_the_values(check: Any, low: float, high: float) -> None:
    import svg_chart

    ticks = svg_chart._ticks(low, high)
    assert ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 9
