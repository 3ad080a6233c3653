"""Speeds from measured steps: robust to outliers and warm-up, quick to follow changes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.throughput import Speeds, StepTime, Throughput, fit_line

TIMES = st.builds(StepTime, st.floats(0, 0.5), st.floats(1e-5, 0.1))


def seen(pairs):
    throughput = Throughput()
    for samples, seconds in pairs:
        throughput.add(samples, seconds)
    return throughput


def test_nothing_is_reported_before_three_steps_after_the_warm_up():
    assert seen([(32, 1.0)] * 5).step_time is None
    known = seen([(32, 9.0)] * 3 + [(32, 1.0)] * 3)
    assert known.step_time.seconds(32) == known.now.seconds(32) == pytest.approx(1.0)


def test_three_steps_at_each_of_two_sizes_determine_the_line():
    true = StepTime(0.02, 0.001)
    pairs = [(b, true.seconds(b)) for b in (24, 24, 24, 40, 40)]
    assert not seen([(32, 9.0)] * 3 + pairs).identified
    estimate = seen([(32, 9.0)] * 3 + [*pairs, (40, true.seconds(40))])
    assert estimate.step_time.alpha_s == pytest.approx(0.02)
    assert estimate.identified


@pytest.mark.parametrize("wobble", [0.0, 0.1, 0.3])
def test_a_steady_speed_never_changes(wobble):
    pairs = [(32, 0.1 * (1 + wobble * (-1) ** step)) for step in range(60)]
    assert seen(pairs).changes == 0


def test_what_a_step_does_beside_computing_is_the_median_of_the_last_sixteen():
    throughput = seen([(32, 1.0)] * 20)
    assert Throughput().exchange_s == throughput.exchange_s == 0.0  # no time was reported
    for exchange_s in [0.3] * 16 + [9.0] * 7:
        throughput.add(32, 1.0, exchange_s)
    assert throughput.exchange_s == 0.3
    throughput.add(32, 1.0, 9.0)
    throughput.add(32, 1.0, 9.0)
    assert throughput.exchange_s == 9.0


@given(TIMES, st.integers(1, 512))
def test_with_one_batch_size_the_time_is_proportional_to_the_samples(true, samples):
    estimate = seen([(samples, true.seconds(samples))] * 8)
    assert estimate.step_time.seconds(samples) == pytest.approx(true.seconds(samples))
    assert estimate.step_time.alpha_s == 0
    assert not estimate.identified


@given(TIMES, st.integers(16, 512))
def test_two_batch_sizes_separate_alpha_from_beta(true, samples):
    sizes = [samples, samples + max(2, samples // 8)] * 8
    estimate = seen([(b, true.seconds(b)) for b in sizes])
    assert estimate.identified
    assert estimate.step_time.alpha_s == pytest.approx(true.alpha_s, rel=1e-3, abs=1e-6)
    assert estimate.step_time.beta_s == pytest.approx(true.beta_s, rel=1e-3)


def test_a_quarter_of_outliers_changes_little():
    generator = random.Random(3)
    true = StepTime(0.02, 0.001)
    pairs = [(b, true.seconds(b) * generator.uniform(0.98, 1.02)) for b in (24, 40) * 12]
    for index in range(5, len(pairs), 5):
        pairs[index] = (pairs[index][0], 3.0)
    estimate = seen(pairs)
    assert estimate.step_time.seconds(32) == pytest.approx(true.seconds(32), rel=0.03)
    assert estimate.step_time.seconds(64) == pytest.approx(true.seconds(64), rel=0.15)


def test_two_small_batches_at_the_end_of_passes_do_not_decide_the_line():
    estimate = seen([(32, 0.1)] * 12 + [(3, 0.5), (32, 0.1), (3, 0.5)])
    assert not estimate.identified
    assert estimate.step_time.seconds(32) == pytest.approx(0.1)


def test_noise_that_hides_the_slope_leaves_the_shape_alone():
    generator = random.Random(1)
    estimate = seen([(b, 0.1 * generator.uniform(0.6, 1.6)) for b in (30, 33) * 12])
    assert not estimate.identified


@pytest.mark.parametrize("factor", [0.25, 0.7, 1.3, 4.0])
def test_a_change_of_speed_is_known_after_five_steps(factor):
    true = StepTime(0.02, 0.001)
    pairs = [(b, true.seconds(b)) for b in (24, 40) * 10]
    after = [(b, true.scaled(factor).seconds(b)) for b in (24, 40, 24, 40, 24)]
    estimate = seen(pairs + after).step_time
    assert estimate.seconds(32) == pytest.approx(factor * true.seconds(32))
    assert estimate.alpha_s == pytest.approx(factor * true.alpha_s, rel=1e-3)


def test_four_slow_steps_are_outliers_still():
    assert seen([(32, 0.1)] * 16 + [(32, 0.4)] * 4).step_time.seconds(32) == pytest.approx(0.1)


@pytest.mark.parametrize("seconds", [0.5, 0.01])
def test_a_last_step_of_over_twice_or_under_half_the_time_may_be_the_new_truth(seconds):
    throughput = seen([(32, 0.1)] * 8 + [(32, seconds)])
    assert throughput.step_time.seconds(32) == pytest.approx(0.1)
    assert throughput.now.seconds(32) == pytest.approx(seconds)
    throughput.add(32, 0.15)
    assert throughput.now.seconds(32) == pytest.approx(0.1)


@pytest.mark.parametrize("before", [[], [(32, 0.1)] * 8], ids=["from the start", "after a change"])
def test_the_last_sixteen_steps_count(before):
    pairs = [*before, *[(32, 1.0)] * 40, *[(32, 1.1)] * 12]
    assert seen(pairs).step_time.seconds(32) == pytest.approx(1.1)


def test_every_change_of_speed_is_counted():
    assert seen([(32, 0.1)] * 12 + [(32, 1.0)] * 12 + [(32, 0.3)] * 12).changes == 2


def test_changes_of_speed_and_exchanges_are_reported_for_each_worker():
    speeds = Speeds()
    for seconds in [1.0] * 8 + [4.0] * 5:
        speeds.measured("a", 10, seconds, 0.25)
        speeds.measured("b", 10, 1.0)
    assert (speeds.of("a").changes, speeds.of("b").changes) == (1, 0)
    assert (speeds.of("a").exchange_s, speeds.of("b").exchange_s) == (0.25, 0.0)


@pytest.mark.parametrize("seconds", [0.06, 0.19])
def test_a_last_step_between_half_and_twice_the_time_is_none(seconds):
    throughput = seen([(32, 0.1)] * 8 + [(32, seconds)])
    assert throughput.now.seconds(32) == pytest.approx(0.1)


def test_slow_drift_is_followed_within_the_window():
    pairs = [(32, 0.1 * 1.01**step) for step in range(100)]
    assert seen(pairs).step_time.seconds(32) == pytest.approx(pairs[-1][1], rel=0.09)


def test_speeds_keep_workers_apart_and_forget():
    speeds = Speeds()
    for _ in range(6):
        speeds.measured("a", 10, 1.0)
        speeds.measured("b", 10, 4.0)
    assert speeds.of("a").step_time.seconds(20) == pytest.approx(2.0)
    assert speeds.of("b").step_time.samples_per_s(10) == pytest.approx(2.5)
    assert (speeds.of("a").steps, speeds.of("a").identified) == (6, False)
    speeds.measured("a", 10, 9.0)
    assert (speeds.of("a").step_time.seconds(10), speeds.of("a").now.seconds(10)) == (
        pytest.approx(1.0),
        pytest.approx(9.0),
    )
    assert (speeds.of("unknown").steps, speeds.of("unknown").changes, speeds.of("unknown").exchange_s) == (0, 0, 0.0)
    assert (speeds.of("unknown").now, speeds.of("unknown").identified) == (None, False)
    speeds.remove("a")
    speeds.remove("unknown")
    assert speeds.of("a").step_time is None


def test_a_line_that_would_begin_below_zero_begins_at_zero():
    line = fit_line([(10, 0.05), (10, 0.05), (10, 0.05), (20, 0.15), (20, 0.15), (20, 0.15)])
    assert line is not None
    assert line.alpha_s == 0.0
    assert line.beta_s == pytest.approx(0.01)
