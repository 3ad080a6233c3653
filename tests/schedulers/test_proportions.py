"""Division of samples: exact totals, shares proportional within one sample, equal ends within one sample."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.proportions import (
    Runner,
    equal_time_split,
    largest_remainder,
    proportional_split,
    steps_to_share,
    water_fill,
)
from nfdt.schedulers.throughput import StepTime

RATES = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)
TIMES = st.lists(st.builds(StepTime, st.floats(0, 2), st.floats(0.001, 1)), min_size=1, max_size=8)
RUNNERS = st.lists(st.builds(Runner, st.floats(0, 5), st.floats(0.05, 5), st.just(1)), min_size=1, max_size=8)


@given(st.integers(0, 10_000), RATES)
def test_largest_remainder_keeps_the_total_and_is_within_one_of_each_share(total, shares):
    counts = largest_remainder(total, shares)
    assert sum(counts) == total
    assert all(abs(n - total * s / math.fsum(shares)) < 1 + 1e-6 for n, s in zip(counts, shares, strict=True))


def test_equal_remainders_go_to_the_first():
    assert largest_remainder(5, [1, 1, 1]) == [2, 2, 1]
    assert largest_remainder(0, [0, 0]) == [0, 0]
    with pytest.raises(ValueError, match="at least one above 0"):
        largest_remainder(1, [0.0])


@given(st.integers(0, 10_000), RATES)
def test_a_proportional_split_keeps_the_total_and_is_within_one_sample(total, rates):
    counts = proportional_split(total, rates)
    assert sum(counts) == total
    assert all(abs(n - total * r / math.fsum(rates)) < 1 + 1e-6 for n, r in zip(counts, rates, strict=True))


@given(RATES, st.floats(0.001, 1000), st.integers(1, 500))
def test_only_ratios_of_speeds_count(rates, factor, each):
    total = each * len(rates)
    scaled = proportional_split(total, [rate * factor for rate in rates])
    assert all(abs(a - b) <= 1 for a, b in zip(proportional_split(total, rates), scaled, strict=True))


@given(RATES, st.integers(1, 64), st.data())
def test_bounds_are_kept_and_so_is_the_total(rates, each, data):
    least = data.draw(st.integers(0, each))
    most = data.draw(st.integers(each, 4 * each))
    counts = proportional_split(each * len(rates), rates, least=least, most=most)
    assert sum(counts) == each * len(rates)
    assert all(least <= n <= most for n in counts)


@given(TIMES, st.integers(0, 2000))
def test_all_workers_with_work_end_within_one_sample_of_the_same_time(times, total):
    end, _ = water_fill(total, times)
    counts = equal_time_split(total, times)
    assert sum(counts) == total
    for n, time in zip(counts, times, strict=True):
        if n:
            assert abs(time.seconds(n) - end) <= time.beta_s + 1e-6
        else:
            assert time.seconds(1) > end - 1e-6


def test_a_worker_that_would_get_too_little_is_left_out():
    times = [StepTime(0.0, 1.0), StepTime(0.0, 1.0), StepTime(9.0, 1.0)]
    assert equal_time_split(21, times) == [10, 10, 1]
    assert equal_time_split(21, times, smallest=4) == [11, 10, 0]
    assert equal_time_split(12, times[1:], smallest=4) == [12, 0]
    assert equal_time_split(12, times[1:], smallest=4, most=12) == [12, 0]
    assert equal_time_split(12, times[1:], smallest=4, most=11) == [11, 1]  # the other one may not take all
    assert equal_time_split(3, times[:2], smallest=4) == [2, 1]  # too little for any worker
    assert equal_time_split(10, [StepTime(0.0, 0.1), StepTime(0.0, 1.0)]) == [9, 1]  # both get something


def test_a_total_outside_the_bounds_is_refused():
    with pytest.raises(ValueError, match="expected 2 workers times 1 to 4 samples"):
        proportional_split(9, [1.0, 1.0], least=1, most=4)
    with pytest.raises(ValueError, match="expected 0 workers"):
        water_fill(1, [])


def end_of(runners, steps):
    return max((r.free_in_s + n * r.step_s for n, r in zip(steps, runners, strict=True) if n), default=0.0)


@given(st.integers(0, 6), RUNNERS.filter(lambda r: len(r) <= 3))
def test_finishing_together_is_as_soon_as_any_way_of_sharing_whole_steps(remaining, runners):
    ways = itertools.product(range(remaining + 1), repeat=len(runners))
    best = min(end_of(runners, way) for way in ways if sum(way) == remaining)
    assert end_of(runners, steps_to_share(remaining, runners)) == pytest.approx(best)


@given(st.integers(1, 3000), RUNNERS)
def test_no_worker_idles_for_as_long_as_its_own_step(remaining, runners):
    steps = steps_to_share(remaining, runners)
    end = end_of(runners, steps)
    assert sum(steps) == remaining
    ideal, _ = water_fill(remaining, [StepTime(r.free_in_s, r.step_s) for r in runners])
    assert end <= ideal + max(r.step_s for r in runners) + 1e-6
    for n, runner in zip(steps, runners, strict=True):
        assert end - (runner.free_in_s + n * runner.step_s) <= runner.step_s + 1e-6


@given(
    st.integers(1, 5000),
    st.lists(st.builds(Runner, st.floats(0, 5), st.floats(0.05, 5), st.integers(1, 99)), min_size=1, max_size=8),
)
def test_steps_of_unequal_batches_hold_what_remains_and_no_step_more(remaining, runners):
    steps = steps_to_share(remaining, runners)
    held = sum(n * r.samples for n, r in zip(steps, runners, strict=True))
    assert remaining <= held < remaining + max(r.samples for r in runners)


def test_the_greatest_remainder_gets_what_is_left():
    assert largest_remainder(1, [0.3, 0.7]) == [0, 1]
    assert proportional_split(1, [0.3, 0.7]) == [0, 1]
    assert proportional_split(10, [1.0, 1.0, 1.8]) == [3, 2, 5]
