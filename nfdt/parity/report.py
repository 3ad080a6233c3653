"""Report of a comparison as one HTML file without scripts, with its curves as pictures inside."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence

from nfdt.core.html_page import COLOURS, render_page, render_table
from nfdt.parity.verdict import Comparison, Curve, Metric

PLAIN = "plain"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 460, 260, 60, 34


def render_html(
    title: str, metric: Metric, curves: Mapping[str, Sequence[Curve]], found: Mapping[str, Comparison]
) -> str:
    """Return the page: verdicts, then the metric of each repetition over epochs and over seconds.

    Args:
        title: What was compared.
        metric: Metric that was compared.
        curves: Curves of each algorithm, and of plain Keras under :data:`PLAIN`.
        found: Comparison of each algorithm with plain Keras.
    """
    heads = ("algorithm", "verdict", metric.name, "difference", "epoch, times as fast", "s until as good as plain")
    over_epochs = {
        name: [[(float(at), epoch.value) for at, epoch in enumerate(curve, start=1)] for curve in each]
        for name, each in curves.items()
    }
    over_time = {name: [[(e.seconds, e.value) for e in curve] for curve in each] for name, each in curves.items()}
    legend = " ".join(
        f'<span style="color:{COLOURS[index % len(COLOURS)]}">■ {html.escape(name)}</span>'
        for index, name in enumerate(curves)
    )
    pictures = _picture(over_epochs, "epoch", metric.name) + _picture(over_time, "seconds", metric.name)
    return render_page(title, f"{render_table(heads, table(metric, curves, found))}<p>{legend}</p>{pictures}")


def table(
    metric: Metric, curves: Mapping[str, Sequence[Curve]], found: Mapping[str, Comparison]
) -> list[tuple[str, ...]]:
    """Return the rows of the report's table; the first one is that of plain Keras."""
    finals = [curve[-1].value for curve in curves[PLAIN]]
    rows: list[tuple[str, ...]] = [(PLAIN, "", f"{statistics.fmean(finals):.4g}", "", "1", "")]
    for name, each in found.items():
        margin = "unknown" if math.isinf(each.margin) else f"{each.margin:.2g}"
        reached = "never" if each.seconds_to_plain is None else f"{each.seconds_to_plain:.1f}"
        difference = f"{each.difference:+.4g} ± {margin}"
        rows.append((name, each.verdict, f"{each.final:.4g}", difference, f"{each.speed_up:.2f}", reached))
    return rows


_Points = Sequence[tuple[float, float]]


def _picture(lines: Mapping[str, Sequence[_Points]], x_name: str, y_name: str) -> str:
    """Return a line chart as SVG."""
    points = [p for each in lines.values() for line in each for p in line if math.isfinite(p[1])]
    if not points:
        return "<p>No numbers to draw.</p>"
    (left, right), (low, high) = (_range([p[i] for p in points]) for i in (0, 1))

    def place(point: tuple[float, float]) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 8) * (point[0] - left) / (right - left)
        y = (_HEIGHT - _BOTTOM) - (_HEIGHT - _BOTTOM - 8) * (point[1] - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    drawn = "".join(
        f'<polyline fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.5" opacity="0.8" '
        f'points="{" ".join(place(p) for p in line if math.isfinite(p[1]))}"/>'
        for index, each in enumerate(lines.values())
        for line in each
    )
    ticks = [
        f'<text x="{_LEFT - 6}" y="{place((left, value)).split(",")[1]}" text-anchor="end">{value:.3g}</text>'
        for value in (low, (low + high) / 2, high)
    ]
    below = _HEIGHT - _BOTTOM + 14
    ticks += [
        f'<text x="{place((value, low)).split(",")[0]}" y="{below}" text-anchor="middle">{value:.3g}</text>'
        for value in (left, (left + right) / 2, right)
    ]
    names = (
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 2}" text-anchor="middle">{html.escape(x_name)}</text>'
        f'<text x="4" y="12">{html.escape(y_name)}</text>'
    )
    frame = f'<path d="M{_LEFT} 8V{_HEIGHT - _BOTTOM}H{_WIDTH - 8}" fill="none" stroke="#888"/>'
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="11"'
    return f"<svg {size}>{frame}{drawn}{''.join(ticks)}{names}</svg>"


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
