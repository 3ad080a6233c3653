"""Measured epochs of one real worker, and the plan that is made of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.specs.job import resolve_algorithm
from nfdt.planning.calibration import (
    DOMINANT_SHARE,
    MeasuredEpochs,
    MeasuredWorker,
    measured_worker,
    spread_of_ratio,
    step_of,
    with_overhead,
)
from nfdt.planning.cost_model import Cluster, WorkerCost
from nfdt.planning.forecast import forecast
from nfdt.schedulers.throughput import StepTime

BATCH = 10
seconds = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12).map(tuple)


def epochs(*seconds: float, steps: int = 10) -> MeasuredEpochs:
    return MeasuredEpochs(steps, seconds)


def test_the_parts_of_a_measured_epoch_add_up():
    worker = MeasuredWorker(epochs(1.0, 1.2, 1.1), step_s=0.08, exchange_s=0.03)
    assert worker.epochs.step_s == pytest.approx(0.11)
    assert worker.compute_s == pytest.approx(0.05)
    assert worker.epoch_end_s == pytest.approx(0.3)
    assert worker.overhead_share == pytest.approx(0.06 / 0.11)
    quiet_s = worker.quiet_step_s
    assert 0.06 / (0.06 + quiet_s) == pytest.approx(DOMINANT_SHARE)


@given(seconds, st.just(0.0) | st.floats(1e-4, 5.0), st.floats(0.0, 5.0), st.floats(0.001, 5.0))
def test_no_part_exceeds_the_whole(taken, step_s, exchange_s, compute_s):
    worker = measured_worker(epochs(*taken), step_s, exchange_s, compute_s)
    assert 0 < worker.compute_s <= worker.step_s <= worker.epochs.step_s
    assert worker.exchange_s >= 0
    assert worker.epoch_end_s >= 0
    assert 0 <= worker.overhead_share < 1


@given(seconds, st.floats(0.001, 1.0), st.floats(0.0, 1.0), st.floats(1e-5, 0.1), st.floats(0.0, 0.5))
def test_one_worker_is_planned_to_take_what_it_took(taken, step_s, exchange_s, beta_s, alpha_s):
    alone = StepTime(alpha_s, beta_s)
    worker = measured_worker(epochs(*taken), step_s, exchange_s, alone.seconds(BATCH))
    line = step_of(worker, alone, BATCH)
    assert line.seconds(BATCH) == pytest.approx(worker.compute_s)
    assert line.alpha_s >= 0
    one = with_overhead(Cluster((WorkerCost("w", line),), BATCH), worker)
    samples = BATCH * worker.epochs.steps
    tail_s = worker.step_s / 2  # the forecast's estimate of the last wait
    found = forecast(resolve_algorithm("asgd"), one, samples)
    assert found.epoch_s == pytest.approx(worker.epochs.step_s * worker.epochs.steps + tail_s)


def test_what_shards_and_links_already_take_is_kept():
    worker = MeasuredWorker(epochs(1.0), step_s=0.08, exchange_s=0.03)
    cluster = Cluster(
        (WorkerCost("w", StepTime(0.0, 0.01), exchange_s=0.5),), BATCH, shard_step_s=0.01, allreduce_s=0.2
    )
    found = with_overhead(cluster, worker)
    assert found.workers[0].exchange_s == pytest.approx(0.52)
    assert found.allreduce_s == pytest.approx(0.23)
    assert found.epoch_end_s == pytest.approx(0.2)


@given(seconds, seconds)
def test_the_range_of_a_ratio_contains_it(above, below):
    low, high = spread_of_ratio(epochs(*above), epochs(*below))
    assert 0 < low <= 1 + 1e-9
    assert high >= 1 - 1e-9


def test_the_range_is_that_of_quartiles_so_that_one_stumble_does_not_widen_it():
    assert epochs(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0).spread == (1, 1)
    assert epochs(1.0, 2.0, 3.0).spread == pytest.approx((0.5, 1.5))
    assert spread_of_ratio(epochs(1.0, 2.0, 3.0), epochs(5.0)) == pytest.approx((0.5, 1.5))


def test_epochs_measured_at_two_times_are_one_measurement():
    assert epochs(1.0) + epochs(3.0) == epochs(1.0, 3.0)
