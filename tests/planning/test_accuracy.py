"""Expected losses of accuracy: measured ones are returned, others are marked as unknown."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from nfdt.planning.accuracy import (
    BARRIER,
    AccuracyLoss,
    MeasuredTraining,
    expected_loss,
    measured_as,
    measured_trainings,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "convergence.md"
ONE = MeasuredTraining(
    "a task",
    90.0,
    {"ddc": {8: 89.0, 16: 87.0}, "plain": {4: 85.0, 8: None}, "dc": {8: None}},
    {"plain": {8: (5, 80.0), 32: (25, 70.0)}},
)
OTHER = MeasuredTraining("another task", 70.0, {"ddc": {8: 60.0}})


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr("nfdt.planning.accuracy.measured_trainings", lambda: (ONE, OTHER))


@pytest.mark.parametrize(
    ("row", "delay", "expected", "text"),
    [
        ("ddc", 0, AccuracyLoss(0.0, 0.0), "0.0"),
        ("ddc", 7, AccuracyLoss(1.0, 10.0), "1.0 to 10.0"),
        ("ddc", 3.5, AccuracyLoss(0.5, 5.0), "0.5 to 5.0"),
        ("ddc", 11, AccuracyLoss(2.0, 2.0), "2.0"),
        ("ddc", 20, AccuracyLoss(10.0), "over 10.0"),
        ("plain", 3, AccuracyLoss(5.0, 5.0), "5.0"),
        ("plain", 5, AccuracyLoss(5.0), "over 5.0"),
        ("plain", 7, AccuracyLoss(10.0, 10.0, 5), "diverges (10.0 at lr/5)"),
        ("plain", 8, AccuracyLoss(20.0, 20.0, 25), "diverges (20.0 at lr/25)"),
        ("plain", 40, AccuracyLoss(rate=None), "diverges"),
        ("dc", 3, AccuracyLoss(), "unknown"),
        ("never", 0, AccuracyLoss(), "unknown"),
    ],
)
def test_losses_lie_between_what_was_measured(measured, row, delay, expected, text):
    found = expected_loss(row, delay)
    assert (found.low, found.high, found.rate) == (
        pytest.approx(expected.low),
        pytest.approx(expected.high),
        expected.rate,
    )
    assert str(found) == text


def test_every_figure_is_one_of_the_published_ones():
    published = DOCUMENT.read_text()
    for training in measured_trainings():
        rows = [accuracy for row in training.rows.values() for accuracy in row.values() if accuracy is not None]
        lower = [accuracy for row in training.lower.values() for _, accuracy in row.values()]
        for figure in (training.one_machine, *rows, *lower):
            assert f"{figure}" in published, training.task


def test_a_training_is_the_same_after_it_was_written_as_json():
    assert MeasuredTraining.from_json(json.loads(json.dumps(asdict(ONE)))) == ONE


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_name_in_the_table(preset):
    known = {row for training in measured_trainings() for row in training.rows}
    algorithm = resolve_algorithm(preset)
    # No training with local steps is in the table yet.
    assert measured_as(algorithm) in ({""} if algorithm.exchange_facts.local else known)


def test_rows_of_another_make_are_unknown():
    assert measured_as(resolve_algorithm("group-sync", update_rule="plain")) == ""
    assert str(expected_loss("", 7)) == "unknown"
    assert measured_as(resolve_algorithm("allreduce")) == BARRIER
