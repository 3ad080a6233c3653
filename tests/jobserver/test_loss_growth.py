"""Losses that have grown beyond any use, and ordinary trainings, which are not taken for such."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.jobserver.job_results import has_exploded

ORDINARY = {
    "near zero at first": [1e-12, 1e-5, 0.3, 2.0, 40.0],
    "zero at first": [0.0, 3.0, 1e3],
    "unscaled targets": [2.5e11, 9e10, 3e10],
    "a bad epoch": [0.7, 900.0, 0.6],
    "a weight that is annealed from zero": [1e-3, 1.0, 1e2, 5e3, 5e3],
    "a critic without a lower bound": [0.1, -1e3, -1e7, -1e12],
    "an adversary": [0.7, 1e-9, 12.0],
}
DIVERGED = {
    "squares of a large rate": [3.0, 2.5e15],
    "a slow explosion": [0.7, 30.0, 4e3, 2e5, 9e6],
    "after a minimum": [1e3, 1.5, 2e6],
    "from unscaled targets": [2.5e5, 1e12],
    "from a negative loss": [-4.0, 5e6],
}


def found(losses):
    return [has_exploded(loss, losses[:at]) for at, loss in enumerate(losses)]


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_trainings_are_left_alone(name):
    assert not any(found(ORDINARY[name]))


@pytest.mark.parametrize("name", DIVERGED)
def test_losses_that_exploded_are_found(name):
    assert found(DIVERGED[name])[-1]
    assert not any(found(DIVERGED[name])[:-1])


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_first_loss_says_nothing_of_its_scale(loss):
    assert not has_exploded(loss, [])


@given(st.lists(st.floats(-1e6, 1e6), max_size=9))
def test_no_loss_below_a_million_is_warned_of(losses):
    assert not any(found(losses))
