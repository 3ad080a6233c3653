"""Pictures of the documentation: what their scripts draw from the tables of the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.reports import algorithm_tree, unequal_figure
from nfdt.core.specs.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_the_picture_of_unequal_machines_is_that_of_the_table():
    assert unequal_figure.PICTURE.read_text(encoding="utf-8") == unequal_figure.draw(unequal_figure.read(PAGE))


def test_the_picture_changes_with_the_table():
    drawn = unequal_figure.draw(unequal_figure.read(PAGE.replace("| 23.0 |", "| 24.5 |")))
    assert "24.5 s" in drawn
    assert drawn != unequal_figure.PICTURE.read_text(encoding="utf-8")


def test_a_page_without_the_table_is_an_error():
    with pytest.raises(ValueError, match="Expected a table"):
        unequal_figure.read("# Benchmarks\n")


def test_the_text_beside_the_picture_has_the_seconds_of_the_table():
    (text,) = re.findall(r"!\[(.*)\]\(docs/images/unequal.svg\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    rows = {row.preset: row.seconds for row in unequal_figure.read(PAGE)}
    assert {name: float(seconds) for name, seconds in re.findall(r"([a-z-]+) (?:takes )?([\d.]+) s", text)} == rows


def test_the_questions_lead_to_presets():
    assert algorithm_tree.PICTURE.read_text(encoding="utf-8") == algorithm_tree.draw()
    names = {leaf.split(",")[0] for leaf in algorithm_tree.leaves(algorithm_tree.ROOT)} - {"plain Keras"}
    page = (ROOT / "docs" / "which_algorithm.md").read_text(encoding="utf-8")
    assert names <= set(PRESETS)
    assert [name for name in PRESETS if f"`{name}`" not in page] == []
