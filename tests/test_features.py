"""The page of what works is that of the tests' marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.features import AREAS, PAGE, Feature, all_features, page, read, whole_page

SOURCE = """
import pytest

@pytest.mark.parametrize("x", [1])
@pytest.mark.feature("Lion", "Nadam", area="Optimizers")
@pytest.mark.feature("Several in one model", area="Models", status="refused", note="train them apart")
def test_any_optimizer_works(x): ...

class TestOthers:
    @pytest.mark.feature("Lion", area="Optimizers")
    def test_lion(self): ...

def test_without_a_mark(): ...
"""
FILE = Path("tests/test_x.py")


def test_the_page_is_the_one_that_the_marks_make():
    assert PAGE.read_text(encoding="utf-8") == whole_page(), "run scripts/features"


def test_no_area_is_without_a_feature():
    assert {feature.area for feature in all_features()} == set(AREAS)


def test_marks_are_read_from_the_text():
    assert list(read(FILE, SOURCE)) == [
        Feature("Optimizers", "Lion", "works", "", FILE, "test_any_optimizer_works"),
        Feature("Optimizers", "Nadam", "works", "", FILE, "test_any_optimizer_works"),
        Feature("Models", "Several in one model", "refused", "train them apart", FILE, "test_any_optimizer_works"),
        Feature("Optimizers", "Lion", "works", "", FILE, "test_lion"),
    ]


def test_a_feature_has_one_line_with_all_its_proofs():
    lines = page(read(FILE, SOURCE)).splitlines()
    link = "(../tests/test_x.py)"
    assert f"| Lion | works | [any optimizer works]{link}; [lion]{link} |" in lines
    assert f"| Several in one model | refused: train them apart | [any optimizer works]{link} |" in lines
    assert lines.index("## Models") < lines.index("## Optimizers")


@pytest.mark.parametrize(
    "mark",
    [
        'area="Optimizers"',
        '"x"',
        '"x", area="Elsewhere"',
        '"x", area="Data", status="perhaps"',
        '"x", area="Data", y=1',
    ],
)
def test_a_mark_that_cannot_be_read_is_named(mark):
    with pytest.raises(ValueError, match=r"tests/test_x\.py::test_a: expected feature"):
        list(read(FILE, f"@pytest.mark.feature({mark})\ndef test_a(): ..."))


def test_tests_have_to_agree_on_a_status():
    found = [Feature("Data", "x", status, "", FILE, "test_a") for status in ("works", "refused")]
    with pytest.raises(ValueError, match="expected one status"):
        page(found)
