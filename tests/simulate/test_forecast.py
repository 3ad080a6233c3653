"""Comparison of predictions with the simulator, which runs the servers' own code."""

from __future__ import annotations

import numpy as np
import pytest
from nfdt_client.options import resolve

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from nfdt.planning.forecast import forecast, measured_cluster, recommend
from nfdt.simulate.job import SimulatedJob
from nfdt.simulate.machines import costs_of
from tests.support.simulated_jobs import BATCH, Kept, X, Y, build, cluster

pytestmark = pytest.mark.processes

EPOCH = 8
MANY = (np.tile(X, (EPOCH, 1)), np.tile(Y, (EPOCH, 1)))  # 96 batches
SLOW = {"bandwidth_mbit": 0.5, "latency_ms": 2}  # the model's 116 bytes take 2 ms
HALF = {"count": 4, "step_ms": 200, "link": "rack"}
CLUSTERS = {
    "equal": cluster({"count": 4}),
    "equal with a slow link": cluster({"count": 4, "bandwidth_mbit": 0.02, "latency_ms": 5}),
    "equal with a very slow link": cluster({"count": 4, "bandwidth_mbit": 0.005, "latency_ms": 5}),
    "unequal with links": cluster({"count": 2, **SLOW}, {"step_ms": 250, **SLOW}, {"step_ms": 400, **SLOW}),
    "unequal with overhead": cluster({"count": 3, "overhead_ms": 10}, {"step_ms": 300, "overhead_ms": 30}),
    "jitter": cluster({"count": 4, "jitter": 0.2}, shards={"apply_ms": 5}),
    "a full shard": cluster({"count": 8}, shards={"apply_ms": 25}),
    "a shared link": cluster({"count": 4, "link": "rack"}, HALF, links={"rack": {"bandwidth_mbit": 0.1}}),
    "a full shared link": cluster({"count": 4, "link": "rack"}, HALF, links={"rack": {"bandwidth_mbit": 0.02}}),
    "a shard's link": cluster({"count": 4}, shards={"bandwidth_mbit": 0.1, "latency_ms": 1, "apply_ms": 2}),
}
# The variants of dc take the same time as asgd. Of local steps the forecast leaves out the ends of epochs, which are a
# large part of epochs as short as these.
TIMED = [name for name in PRESETS if name not in ("dc-asgd", "dc-asgd-a", "dc-asgd-k", "asgd", "local-ddc")]
# On a full link that workers share, adaptive codecs learn for epochs: each worker's bandwidth depends on the others.
LEARNING = [("a full shared link", "h-ps"), ("a full shared link", "auto")]
CASES = [(where, name) for where in CLUSTERS for name in TIMED if (where, name) not in LEARNING]
USUAL = ("unequal with links", "a full shard")
LONG = [pytest.param(*case, marks=pytest.mark.long) for case in CASES if case[0] not in USUAL]


def trainer(preset, times=1):
    """Return a function that trains a program, traced once, with any preset of its kind on any cluster.

    It returns the second epoch's seconds and mean staleness.
    """
    data = tuple(np.tile(array, (times, *[1] * (array.ndim - 1))) for array in MANY)
    with Kept(resolve({"algorithm": preset}, environ={}), CLUSTERS["equal"]) as session:
        build(rate=1e-4).fit(*data, batch_size=BATCH, epochs=2, verbose=0)
    first, artifacts = session.jobs[0], {name: session.read(name) for name in session.submission.blobs}

    def train(described, algorithm):
        size = first.spec.cluster.model_copy(update={"workers": described.count})
        spec = first.spec.model_copy(update={"algorithm": algorithm, "cluster": size})
        job = SimulatedJob(spec, session.manifest, artifacts.__getitem__, described, first.trainer)
        job.proceed(2)
        ends = []
        for event in job.events():
            if event.kind == "epoch_end":
                ends.append((job.record.seconds, job.record.staleness.copy()))
        (began, before), (ended, after) = ends
        later = after - before
        return ended - began, sum(tau * count for tau, count in later.items()) / later.total()

    return train


@pytest.fixture(scope="module")
def trained():
    """Provide the function of :func:`trainer` for gradients."""
    return trainer("asgd")


def within_15_percent(trained, described, algorithm, times=1):
    seconds, staleness = trained(described, algorithm)
    costs = costs_of(described, BATCH, 4 * build().count_params())
    predicted = forecast(algorithm, costs, times * len(MANY[0]))
    assert predicted.epoch_s == pytest.approx(seconds, rel=0.15)
    assert predicted.staleness == pytest.approx(staleness, abs=0.5, rel=0.15)


@pytest.mark.parametrize(("where", "name"), [*(case for case in CASES if case[0] in USUAL), *LONG])
def test_predictions_are_within_15_percent_of_the_simulator(trained, where, name):
    within_15_percent(trained, CLUSTERS[where], resolve_algorithm(name))


def test_local_steps_are_predicted_in_epochs_of_many_rounds_with_the_delay_of_one_push():
    where = CLUSTERS["unequal with links"]
    within_15_percent(trainer("local-ddc", times=4), where, resolve_algorithm("local-ddc"), times=4)


@pytest.mark.parametrize(("codec", "overlap"), [("int8", 0), ("bf16", 1), ("adaptive", 0)])
def test_codecs_are_predicted_where_each_worker_has_its_own_slow_link(trained, codec, overlap):
    algorithm = resolve_algorithm("asgd", codec=codec, overlap=overlap)
    within_15_percent(trained, CLUSTERS["equal with a very slow link"], algorithm)


def forecasts(described, *names, samples=100_000, weights=50_000):
    costs = costs_of(described, 32, 4 * weights)
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


@pytest.mark.parametrize(("workers", "advised"), [(2, False), (32, True)])
def test_smaller_batches_are_advised_where_much_is_lost(workers, advised):
    _, reason = recommend(forecasts(cluster({"count": workers}), "ddc-asgd"))
    assert ("smaller batch_size" in reason) == advised


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
    (predicted,) = [forecast(resolve_algorithm("asgd"), found, 100_000)]
    assert predicted.samples_per_s == pytest.approx(32 / 0.1 + 32 / 0.2, rel=0.01)
    assert measured_cluster({"worker-0": {"samples": 3}}) is None
