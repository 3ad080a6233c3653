import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.planning.limits import lower_bound, of_lower_bound

MIXED = (1, 1, 1, 1, 2, 2, 5, 5)


@pytest.mark.parametrize(
    ("seconds", "bounds"),
    [
        ((1,) * 8, [(1.125, 8), (2.25, 8), (13.5, 8)]),
        (MIXED, [(1.25, 4), (3.2, 6), (20.0, 8)]),
        ((1,) * 7 + (10,), [(1.1429, 7), (2.4286, 7), (15.2113, 8)]),
        ([math.sqrt(i) for i in range(1, 101)], [(1.7510, 3), (3.8977, 15), (10.7587, 100)]),
    ],
)
def test_the_lower_bound_has_the_values_computed_by_hand(seconds, bounds):
    found = [lower_bound(seconds, noise) for noise in (1, 10, 100)]
    assert [(pytest.approx(b.seconds, abs=1e-4), b.workers) for b in found] == bounds


@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=20),
    st.floats(0.0, 1000.0),
    st.floats(0.01, 1.0),
    st.floats(0.0, 100.0),
)
def test_no_schedule_beats_the_lower_bound(seconds, noise, busy, more):
    rate = busy * sum(1 / each for each in seconds)
    assert of_lower_bound(seconds, noise, rate, len(seconds) + more) <= 1 + 1e-9


def test_equal_workers_that_never_wait_reach_the_lower_bound_and_a_barrier_of_unequal_ones_does_not():
    assert of_lower_bound([1] * 8, 10, 8.0, 8) == pytest.approx(1)
    assert of_lower_bound([1] * 8, 10, 8.0, 16) == pytest.approx(18 / 26)  # twice as many in flight
    assert of_lower_bound(MIXED, 10, 8 / 5, 8) == pytest.approx(3.2 * 1.6 / 18)
