"""Picture of the time to a target accuracy on unequal machines, from the table of docs/benchmarks.md.

``python -m benchmarks.reports.unequal_figure`` writes docs/images/unequal.svg.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reports.svg import ACCENT, MUTED, box, picture, text

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "unequal.svg"
HEAD = "| 1,1,4,4 | samples/s | of the limit | s to 84 % |"
ROW = re.compile(r"\| ([\w-]+) \| [\d,]+ \| [\d.]+ \| ([\d.]+) \|")
BAR, LEFT, TOP, WIDTH = 26, 110, 84, 640


@dataclass(frozen=True)
class Measured:
    """A preset and the seconds that it takes to the target accuracy."""

    preset: str
    seconds: float


def read(page: str) -> Sequence[Measured]:
    """Return the rows of the table of the page, in its order.

    Raises:
        ValueError: the page has no such table.
    """
    _, found, rest = page.partition(HEAD)
    if not found:
        raise ValueError(f"Expected a table that begins with {HEAD!r}. Received a page without it: adapt HEAD.")
    return [Measured(name, float(seconds)) for name, seconds in ROW.findall(rest.partition("\n\n")[0])]


def draw(rows: Sequence[Measured]) -> str:
    """Return the picture: a bar per preset, the quickest first."""
    ordered = sorted(rows, key=lambda row: row.seconds)
    slowest = ordered[-1].seconds
    elements = [
        text(20, 30, "Two fast workers and two that are 4 times slower", size=17, bold=True),
        text(20, 50, "Seconds of training until 84 % of the test images are right.", size=13),
        text(20, 67, "Fashion-MNIST, a small CNN, emulated speeds, medians of 3 seeds", size=13),
    ]
    for i, row in enumerate(ordered):
        y, length = TOP + i * (BAR + 10), (WIDTH - LEFT - 70) * row.seconds / slowest
        elements += [
            text(LEFT - 10, y + 18, row.preset, anchor="end", bold=True),
            box(LEFT, y, length, BAR, fill=MUTED if row.seconds == slowest else ACCENT),
            text(LEFT + length + 8, y + 18, f"{row.seconds:g} s"),
        ]
    height = TOP + len(ordered) * (BAR + 10) + 12
    return picture(WIDTH, height, "; ".join(f"{row.preset}: {row.seconds:g} s" for row in ordered), elements)


if __name__ == "__main__":
    PICTURE.write_text(draw(read(TABLE.read_text(encoding="utf-8"))), encoding="utf-8")
