"""Verdicts of a comparison."""

from __future__ import annotations

import math

import pytest

from nfdt.parity.verdict import CurvePoint, Metric, choose_metric, compare, seconds_to

ACCURACY, LOSS = Metric("accuracy", lower_is_better=False), Metric("loss", lower_is_better=True)


def curve(*values: float, epoch_s: float = 1.0):
    return [CurvePoint(epoch_s * (number + 1), value) for number, value in enumerate(values)]


PLAIN = [curve(0.5, 0.8, 0.90), curve(0.5, 0.8, 0.91), curve(0.5, 0.8, 0.92)]


@pytest.mark.parametrize(
    ("names", "wanted", "expected"),
    [
        (["accuracy", "loss", "val_accuracy", "val_loss"], None, Metric("val_accuracy", False)),
        (["accuracy", "loss"], None, ACCURACY),
        (["loss", "val_loss"], None, Metric("val_loss", True)),
        (["loss", "mae"], None, Metric("mae", True)),
        (["accuracy", "loss"], "loss", LOSS),
    ],
)
def test_the_metric_is_that_of_the_validation_and_not_the_loss(names, wanted, expected):
    assert choose_metric(names, wanted) == expected


@pytest.mark.parametrize(("names", "wanted"), [([], None), (["loss"], "accuracy")])
def test_a_metric_that_is_not_there_is_an_error(names, wanted):
    with pytest.raises(ValueError, match="expected"):
        choose_metric(names, wanted)


def test_a_difference_within_the_confidence_interval_is_noise():
    found = compare(ACCURACY, PLAIN, [curve(0.5, 0.8, value) for value in (0.89, 0.91, 0.92)])
    assert found.verdict == "within noise of plain"
    assert found.margin > abs(found.difference) > 0


@pytest.mark.parametrize(("metric", "worse_by"), [(ACCURACY, 0.1), (LOSS, -0.1)])
def test_a_lower_value_is_worse_or_better_by_the_metric(metric, worse_by):
    found = compare(metric, PLAIN, [curve(0.5, 0.7, value) for value in (0.80, 0.81, 0.82)])
    assert found.verdict.startswith("lower by 0.1 ± ")
    assert found.worse_by == pytest.approx(worse_by)
    assert found.misses(0.05) is (worse_by > 0)


@pytest.mark.parametrize("values", [(0.5, 0.5, 0.5), (0.1, 0.1, 0.1), (0.5, 0.6, math.nan)])
def test_what_ends_where_plain_began_or_in_nan_did_not_train(values):
    found = compare(ACCURACY, PLAIN, [curve(*values)] * 3)
    assert found.verdict == "did not train"
    assert found.misses(0.1)


def test_equal_repetitions_are_within_noise():
    assert compare(ACCURACY, [curve(0.9)] * 3, [curve(0.9)] * 3).verdict == "within noise of plain"


def test_one_repetition_knows_no_noise():
    found = compare(ACCURACY, PLAIN[:1], [curve(0.5, 0.8, 0.88)])
    assert found.verdict == "lower by 0.02, one repetition"
    assert math.isinf(found.margin)


def test_speed_is_that_of_the_epochs_after_the_first():
    quick = [[CurvePoint(9.0, 0.5), CurvePoint(9.5, 0.8), CurvePoint(10.0, 0.91)]]
    found = compare(ACCURACY, PLAIN, quick)
    assert found.speed_up == 2.0
    assert found.seconds_to_plain == 10.0
    assert math.isnan(compare(ACCURACY, PLAIN, [curve(0.9)]).speed_up)


def test_a_goal_that_most_repetitions_miss_is_never_reached():
    assert seconds_to(ACCURACY, 0.95, PLAIN) is None
    assert seconds_to(ACCURACY, 0.905, PLAIN) == 3.0
