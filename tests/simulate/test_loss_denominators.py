"""Losses with denominators of their own: several workers train as one process does with the batch of all of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.support.loss_cases import CASES, build, data, flat
from tests.support.simulated_jobs import cluster, simulate

pytestmark = pytest.mark.processes

WORKERS, BATCH, EPOCHS = 3, 4, 2  # of 46 rows the last round has 10: parts of 4, 4 and 2
TOGETHER = {"bsp": {}, "allreduce": {}, "group-sync": {"groups": "1", "batch": "fixed"}}
COUNTED = ("masked", "masked and weighted", "mean by weights", "mean by weights and mask", "without a class")
ALONE = ("bsp", "asgd", "ddc-asgd", "ssp", "n-softsync")


@functools.cache
def trained_alone(loss, batch):
    """Return weights and losses of Keras alone."""
    x, y, weights = data(**CASES[loss])
    model = build(**CASES[loss])
    history = model.fit(x, y, sample_weight=weights, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0)
    return flat(model), history.history["loss"]


def trained(loss, workers, algorithm, **options):
    """Return weights and losses of a simulated job."""
    x, y, weights = data(**CASES[loss])
    model = build(**CASES[loss])
    fit = {"x": x, "y": y, "epochs": EPOCHS, "batch_size": BATCH, "shuffle": False}
    if weights is not None:
        fit["sample_weight"] = weights
    *_, history = simulate(cluster({"count": workers}), algorithm, model=model, **fit, **options)
    return flat(model), history.history["loss"]


@pytest.mark.feature("Losses that are sums, masked, or divided by weights", area="Algorithms")
@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [("bsp", loss) for loss in CASES]
    + [(algorithm, loss) for algorithm in ("allreduce", "group-sync") for loss in ("sum", "masked and weighted")],
)
def test_synchronous_workers_train_as_one_process_does(algorithm, loss):
    expected, losses = trained_alone(loss, WORKERS * BATCH)
    found, logged = trained(loss, WORKERS, algorithm, **TOGETHER[algorithm])
    assert np.abs(expected - flat(build(**CASES[loss]))).max() > 0.05
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logged, losses, rtol=0.05 if loss in COUNTED else 1e-5)


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [(algorithm, "masked and weighted") for algorithm in ALONE]
    + [("ddc-asgd", loss) for loss in ("sum, with a regularizer", "mean by weights")],
)
def test_one_worker_trains_as_keras_does(algorithm, loss):
    expected, losses = trained_alone(loss, BATCH)
    found, logged = trained(loss, 1, algorithm)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logged, losses, rtol=1e-5)


def test_a_short_batch_of_a_sum_keeps_the_rate_that_grows_and_shrinks_with_batches():
    expected, _ = trained_alone("sum", BATCH)
    np.testing.assert_allclose(trained("sum", 1, "dbs-sgd")[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["sum, with a regularizer", "masked and weighted", "mean by weights and mask"])
def test_rounds_of_unequal_parts_train_as_one_process_does(loss):
    expected, _ = trained_alone(loss, WORKERS * BATCH)
    x, y, weights = data(**CASES[loss])
    model = build(**CASES[loss])
    machines = cluster({"count": 2}, {"step_ms": 400})
    fit = {"x": x, "y": y, "sample_weight": weights, "epochs": EPOCHS, "batch_size": BATCH, "shuffle": False}
    job, *_ = simulate(machines, "bsp", model=model, batch="dbs", **fit)
    sizes = {size for worker in job.worker_statistics().values() for size in worker["batch_sizes"]}
    assert len(sizes) > 2
    np.testing.assert_allclose(flat(model), expected, rtol=1e-4, atol=1e-6)
