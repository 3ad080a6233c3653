"""Throughput of unequal workers under the virtual clock, as a share of the sum of their own speeds."""

from __future__ import annotations

import numpy as np
import pytest
from nfdt_client.options import resolve

from nfdt.core.specs.job import resolve_algorithm
from nfdt.simulate.job import SimulatedJob
from tests.support.simulated_jobs import BATCH, Kept, X, Y, build, cluster

STEP_MS, ROUND_TRIP_MS = 50, 2  # an exchange with the shard and a request for work each take one round trip
CLUSTERS = {"1,1,4,4": (1, 1, 4, 4), "1..8": tuple(range(1, 9))}
BATCHES = 400
MANY = (np.resize(X, (BATCHES * BATCH, X.shape[1])), np.resize(Y, (BATCHES * BATCH, 1)))


def unequal(name, round_trip_ms):
    workers = ({"step_ms": STEP_MS * speed, "latency_ms": round_trip_ms / 2} for speed in CLUSTERS[name])
    return cluster(*workers)


@pytest.fixture(scope="module")
def of_the_limit():
    """Provide a function that returns the share of the limit that a preset reaches in its second epoch."""
    with Kept(resolve({"algorithm": "asgd"}, environ={}), cluster({"count": 2, "step_ms": 1})) as session:
        build(rate=1e-4).fit(*MANY, batch_size=BATCH, epochs=2, verbose=0)
    first, artifacts = session.jobs[0], {name: session.read(name) for name in session.submission.blobs}

    def train(name, algorithm, round_trip_ms):
        described = unequal(name, round_trip_ms)
        size = first.spec.cluster.model_copy(update={"workers": described.count})
        spec = first.spec.model_copy(update={"algorithm": resolve_algorithm(algorithm), "cluster": size})
        job = SimulatedJob(spec, session.manifest, artifacts.__getitem__, described, first.trainer)
        job.proceed(2)
        ends = [job.record.seconds for event in job.events() if event.kind == "epoch_end"]
        assert job.record.samples == 2 * len(MANY[0])
        limit = sum(1000 * BATCH / worker.step_ms for worker in described.each())
        return len(MANY[0]) / (ends[1] - ends[0]) / limit

    return train


@pytest.mark.long
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("preset", ["auto", "h-ps", "dbs-sgd"])
def test_without_a_network_less_than_a_hundredth_is_lost(of_the_limit, preset, name):
    assert 0.99 <= of_the_limit(name, preset, 0) <= 1.001


@pytest.mark.processes
@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("preset", ["auto", "h-ps", "dbs-sgd"])
def test_requests_for_work_are_hidden_and_only_exchanges_are_lost(of_the_limit, preset, name):
    exchanges = sum(1 / s / (1 + ROUND_TRIP_MS / STEP_MS / s) for s in CLUSTERS[name])
    limit_with_exchanges = exchanges / sum(1 / s for s in CLUSTERS[name])
    assert of_the_limit(name, preset, ROUND_TRIP_MS) >= limit_with_exchanges - 0.012
