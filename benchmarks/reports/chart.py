"""Charts of several panels with common colours for the documentation, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.reports.svg import INK, PALE, box, dot, line, picture, text
from nfdt.simulate.results import COLOURS

Points = Sequence[tuple[float, float]]

DASHES = ("", "6 3", "2 3")
COLUMNS, LEFT, TOP, WIDTH, HEIGHT = 2, 62, 82, 300, 210
STEP_X, STEP_Y, LEGEND_X, LEGEND_Y = 390, 312, 180, 20
BESIDE = 42  # pixels between the titles' left end and the panel's
TICKS = 5


@dataclass(frozen=True)
class Axis:
    """A scale from ``low`` to ``high``; by powers of two if ``doubles``."""

    low: float
    high: float
    doubles: bool = False

    @classmethod
    def around(cls, values: Sequence[float], *, doubles: bool = False) -> Axis:
        """Return the axis that holds all values, with some space beside them."""
        low, high = min(values), max(values)
        if doubles:
            return cls(low / 1.15, high * 1.15, doubles=True)
        space = 0.05 * (high - low or 1.0)
        return cls(low - space, high + space)

    def share(self, value: float) -> float:
        """Return the place of a value, from 0 to 1."""
        low, high, value = (math.log2(v) if self.doubles else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def ticks(self) -> list[float]:
        """Return round values on the axis."""
        if self.doubles:
            powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
            return [2.0**power for power in powers]
        rough = (self.high - self.low) / TICKS
        decade = 10 ** math.floor(math.log10(rough))
        step = next(decade * times for times in (1, 2, 5, 10) if decade * times >= rough)
        return [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: Line above it.
        x: Name of the horizontal axis.
        y: Name of the vertical axis, and what else is fixed in the panel.
        series: Points by the name of the series.
        doubles: Whether the horizontal axis has powers of two.
        joined: Whether a line joins the points of a series.
        level: Value that a horizontal line shows; None: no line.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    doubles: bool = False
    joined: bool = True
    level: float | None = field(default=None)


def draw(title: str, panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Return a picture of panels, two beside each other, and a legend below.

    The place of a series in ``names`` decides its colour, so that it has the same one in several pictures.
    """
    elements = [text(20, 28, title, size=17, bold=True)]
    for i, panel in enumerate(panels):
        elements += _panel(panel, LEFT + i % COLUMNS * STEP_X, TOP + i // COLUMNS * STEP_Y, names)
    drawn = [name for name in names if any(name in panel.series for panel in panels)]
    width = STEP_X * min(COLUMNS, len(panels))
    bottom, columns = TOP + -(-len(panels) // COLUMNS) * STEP_Y, width // LEGEND_X
    for i, name in enumerate(drawn):
        x, y = 20 + i % columns * LEGEND_X, bottom - 14 + i // columns * LEGEND_Y
        colour, dashes = _style(names.index(name))
        elements.append(line([(x, y - 4), (x + 24, y - 4)], colour, dashes))
        elements.append(dot(x + 12, y - 4, colour, hollow=bool(dashes)))
        elements.append(text(x + 32, y, name, size=13))
    return picture(width, bottom + -(-len(drawn) // columns) * LEGEND_Y, title, elements)


def _panel(panel: Panel, left: float, top: float, names: Sequence[str]) -> list[str]:
    points = [point for series in panel.series.values() for point in series]
    across = Axis.around([x for x, _ in points], doubles=panel.doubles)
    up = Axis.around([y for _, y in points] + ([] if panel.level is None else [panel.level]))

    def place(x: float, y: float) -> tuple[float, float]:
        return left + WIDTH * across.share(x), top + HEIGHT * (1 - up.share(y))

    elements = [
        box(left, top, WIDTH, HEIGHT, fill=PALE),
        text(left - BESIDE, top - 26, panel.title, size=13, bold=True),
    ]
    for tick in across.ticks():
        elements.append(text(place(tick, up.low)[0], top + HEIGHT + 17, f"{tick:g}", size=12, anchor="middle"))
    for tick in up.ticks():
        y = place(across.low, tick)[1]
        elements += [
            line([(left, y), (left + WIDTH, y)], "#ffffff"),
            text(left - 6, y + 4, f"{tick:g}", size=12, anchor="end"),
        ]
    elements.append(text(left + WIDTH / 2, top + HEIGHT + 34, panel.x, size=12, anchor="middle"))
    level = "" if panel.level is None else "; dashed: one machine"
    elements.append(text(left - BESIDE, top - 9, panel.y + level, size=12))
    if panel.level is not None:
        y = place(across.low, panel.level)[1]
        elements.append(line([(left, y), (left + WIDTH, y)], INK, "4 3"))
    for name, series in panel.series.items():
        colour, dashes = _style(names.index(name))
        placed = [place(x, y) for x, y in series]
        elements += [line(placed, colour, dashes)] if panel.joined and len(placed) > 1 else []
        elements += [dot(x, y, colour, hollow=bool(dashes)) for x, y in placed]
    return elements


def _style(index: int) -> tuple[str, str]:
    """Return colour and dashes of a series."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
