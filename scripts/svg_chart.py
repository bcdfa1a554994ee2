"""Line charts as plain SVG text, for figures in docs/: no plotting library, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

PANEL_WIDTH, PANEL_HEIGHT = 460, 300
LEFT, TOP, GAP = 58, 44, 78
LEGEND_LINE = 20
# Distinct also for most colour-blind readers (Okabe and Ito), the strongest first.
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00")
DASHES = ("", "7 3", "", "7 3", "", "2 3")


@dataclass(frozen=True)
class Panel:
    """One chart: `lines[name]` holds y values at x = 1, 2, ...; None leaves a gap."""

    title: str
    lines: Mapping[str, Sequence[float | None]]


def render(panels: Sequence[Panel], x_label: str) -> str:
    """The panels side by side over one legend; a name has the same colour everywhere."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width = len(panels) * (PANEL_WIDTH + GAP)
    legend_top = TOP + PANEL_HEIGHT + 62
    height = legend_top + LEGEND_LINE * math.ceil(len(names) / 3) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, LEFT + index * (PANEL_WIDTH + GAP), names, x_label)
    for index, name in enumerate(names):
        x, y = LEFT + (index % 3) * (width - LEFT) / 3, legend_top + LEGEND_LINE * (index // 3)
        parts.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x + 34:.1f}" y2="{y}" {_stroke(index)}/>')
        parts.append(f'<text x="{x + 42:.1f}" y="{y + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float, names: list[str], x_label: str) -> list[str]:
    values = [y for line in panel.lines.values() for y in line if y is not None]
    ticks = _ticks(min(values, default=0.0), max(values, default=1.0))
    low, high = ticks[0], ticks[-1]
    last = max(max((len(line) for line in panel.lines.values()), default=1), 2)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (x - 1) / (last - 1) * PANEL_WIDTH, TOP + (high - y) / (high - low) * PANEL_HEIGHT

    parts = [f'<text x="{left}" y="{TOP - 18}" font-size="15" font-weight="bold">{escape(panel.title)}</text>']
    for tick in ticks:
        _, y = at(1, tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + PANEL_WIDTH}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for x_tick in sorted({1, last, *(round(1 + (last - 1) * part / 4) for part in (1, 2, 3))}):
        x, _ = at(x_tick, low)
        parts.append(f'<text x="{x:.1f}" y="{TOP + PANEL_HEIGHT + 18}" text-anchor="middle">{x_tick}</text>')
    middle = left + PANEL_WIDTH / 2
    parts.append(f'<text x="{middle}" y="{TOP + PANEL_HEIGHT + 36}" text-anchor="middle">{escape(x_label)}</text>')
    for name, line in panel.lines.items():
        for piece in _pieces(line):
            points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in piece)
            parts.append(f'<polyline points="{points}" fill="none" {_stroke(names.index(name))}/>')
    return parts


def _pieces(line: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Runs of neighbouring values."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for x, y in enumerate(line, start=1):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def _stroke(index: int) -> str:
    dash = f' stroke-dasharray="{dashes}"' if (dashes := DASHES[index % len(DASHES)]) else ""
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"{dash}'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose `low..high`, four to nine of them."""
    span = max(high - low, 1e-9 * max(abs(high), 1.0))
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (0.2, 0.5, 1.0, 2.0) if span / (power * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]
