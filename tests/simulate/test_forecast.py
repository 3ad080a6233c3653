"""Predictions against the simulator, which runs the servers' own code."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.core.spec import resolve_algorithm
from nfdt.planning.forecast import forecast, measured_cluster, recommend
from nfdt.simulate.costs import costs_of
from tests.simulate.jobs import BATCH, X, Y, build, cluster, simulate

EPOCH = 8
MANY = (np.tile(X, (EPOCH, 1)), np.tile(Y, (EPOCH, 1)))  # 96 batches
LINK = {"bandwidth_mbit": 0.5, "latency_ms": 2}  # the model's 116 bytes take 2 ms
UNEQUAL = cluster({"count": 2, **LINK}, {"step_ms": 250, **LINK}, {"step_ms": 400, "overhead_ms": 50, **LINK})
JITTERY = cluster({"count": 4, "jitter": 0.2}, shards={"apply_ms": 5})


@pytest.mark.parametrize(
    ("described", "name"),
    [
        *((UNEQUAL, name) for name in ("ddc-asgd", "bsp", "ssp", "dbs-sgd", "h-ps", "group-sync", "allreduce")),
        (JITTERY, "bsp"),
        (JITTERY, "n-softsync"),
    ],
)
def test_predictions_are_within_15_percent_of_the_simulator(described, name):
    job, _, _ = simulate(described, name, model=build(rate=1e-4), x=MANY[0], y=MANY[1])
    predicted = forecast(job.spec.algorithm, costs_of(described, BATCH, build().count_params()), len(MANY[0]))
    assert predicted.epoch_s == pytest.approx(job.record.seconds, rel=0.15)
    assert predicted.staleness == pytest.approx(job.record.mean_staleness, abs=0.5, rel=0.15)


def forecasts(described, *names, samples=100_000, weights=50_000):
    costs = costs_of(described, 32, weights)
    return [forecast(resolve_algorithm(name), costs, samples) for name in names]


def test_equal_machines_that_wait_for_nothing_reach_the_sum_of_their_speeds():
    (found,) = forecasts(cluster({"count": 4}), "asgd")
    assert found.samples_per_s == pytest.approx(4 * 320, rel=0.01)
    assert found.staleness == 3


def test_the_recommended_row_has_a_reason_with_numbers():
    best, reason = recommend(forecasts(cluster({"count": 4}, {"step_ms": 800, "count": 4}), "bsp", "asgd", "ddc-asgd"))
    assert best.algorithm == "ddc-asgd"
    assert "samples/s" in reason
    assert "times the progress of bsp" in reason


def test_without_a_row_that_is_known_the_quickest_is_taken():
    best, reason = recommend(forecasts(cluster({"count": 2}, {"step_ms": 300}), "asgd", "ssp"))
    assert best.algorithm == "asgd"
    assert "most samples per second" in reason


def test_what_a_job_has_measured_is_a_cluster():
    rows = {
        "worker-0": {"step_s": 0.1, "step_exchange_s": 0.02, "batch_size": 32, "samples": 320},
        "worker-1": {"step_s": 0.2, "step_exchange_s": 0.02, "batch_size": 32},
        "worker-2": {"samples": 0},
    }
    found = measured_cluster(rows)
    assert [worker.name for worker in found.workers] == ["worker-0", "worker-1"]
    assert found.workers[0].step.seconds(32) + found.workers[0].exchange_s == pytest.approx(0.1)
    (told,) = [forecast(resolve_algorithm("asgd"), found, 100_000)]
    assert told.samples_per_s == pytest.approx(32 / 0.1 + 32 / 0.2, rel=0.01)
    assert measured_cluster({"worker-0": {"samples": 3}}) is None
