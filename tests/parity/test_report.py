"""The HTML report of a comparison."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from nfdt.parity.report import PLAIN, render_html, table
from nfdt.parity.verdict import CurvePoint, Metric, compare

METRIC = Metric("val_<accuracy>", lower_is_better=False)
CURVES = {
    PLAIN: [[CurvePoint(1.0, 0.5), CurvePoint(2.0, 0.9)], [CurvePoint(1.0, 0.6), CurvePoint(2.0, 0.8)]],
    "asgd": [[CurvePoint(1.0, 0.5), CurvePoint(1.5, math.nan)], [CurvePoint(1.0, 0.5), CurvePoint(1.5, 0.7)]],
}
FOUND = {"asgd": compare(METRIC, CURVES[PLAIN], CURVES["asgd"])}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_the_page_has_a_line_per_repetition_and_needs_nothing_else():
    tags = Tags()
    page = render_html("a & b", METRIC, CURVES, FOUND)
    tags.feed(page)
    assert sum(tag == "polyline" for tag, _ in tags.found) == 2 * 4
    assert not {"script", "link", "img"} & {tag for tag, _ in tags.found}
    assert "a &amp; b" in page
    assert "<accuracy>" not in page
    assert "did not train" in page
    assert not any("nan" in str(attributes.get("points")) for _, attributes in tags.found)


def test_the_table_begins_with_plain():
    rows = table(METRIC, CURVES, FOUND)
    assert rows[0][0] == PLAIN
    assert rows[0][2] == "0.85"
    assert rows[1][0] == "asgd"
    assert rows[1][5] == "never"
