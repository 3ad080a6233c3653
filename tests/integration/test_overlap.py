"""Pushes that overlap with the computation: permitted presets, and the accuracy reached."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.support.local_cluster import flat, train
from tests.support.numpy_shard import ahead

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order]
    return (x[:1344], y[:1344]), (x[1344:], y[1344:])


def classifier():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_ddc_asgd_learns_as_well_with_overlap(digits):
    data, validation = digits
    accuracy = {}
    for overlap in (0, 1, 2):
        outcome = train(
            classifier(),
            *data,
            algorithm="ddc-asgd",
            workers=2,
            overrides={"overlap": overlap},
            transport="shared_memory",
            validation=validation,
            shuffle=True,
            epochs=12,
        )
        assert [epoch["samples"] for epoch in outcome.epochs] == [len(data[0])] * 12
        accuracy[overlap] = outcome.epochs[-1]["val_logs"]["accuracy"]
    assert accuracy[0] > 0.95
    assert min(accuracy[1], accuracy[2]) >= accuracy[0] - 0.025


# -- one worker: its staleness and its trajectory

ROWS, BATCH, RATE = 60, 5, 0.05
STEPS = ROWS // BATCH
RULES = {"asgd": "plain", "dc-asgd": "dc", "ddc-asgd": "ddc"}


@pytest.fixture(scope="module")
def line():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    return x, (x @ np.array([[1.0], [-2.0], [0.5], [3.0]]) + 0.1 * rng.normal(size=(ROWS, 1))).astype("float32")


def regression(momentum):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(RATE, momentum=momentum), "mse")
    return model


def slopes(x, y):
    """Return the gradient of each batch's mean squared error, by hand."""

    def of(rows):
        a, b = np.float64(x[rows]), np.float64(y[rows, 0])
        return lambda weights: 2 / BATCH * a.T @ (a @ weights - b)

    return [of(slice(start, start + BATCH)) for start in range(0, ROWS, BATCH)]


def staleness_of(outcome):
    """Return the staleness of worker 0 as the first shard counted it."""
    return outcome.staleness[0]["workers"]["worker-0"]["staleness"]


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "stream"])
@pytest.mark.parametrize(("algorithm", "momentum"), [("asgd", 0.9), ("dc-asgd", 0.0), ("ddc-asgd", 0.9)])
def test_one_worker_is_one_update_behind_from_its_second_step_on(line, algorithm, momentum, transport):
    model = regression(momentum)
    outcome = train(model, *line, algorithm=algorithm, batch_size=BATCH, overrides={"overlap": 1}, transport=transport)
    staleness, _, weights = ahead(RULES[algorithm], flat(model), slopes(*line), 1, momentum, RATE)
    assert staleness == [0] + [1] * (STEPS - 1)
    assert staleness_of(outcome) == {"0": 1, "1": STEPS - 1}
    np.testing.assert_allclose(outcome.weights, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.feature("`overlap` of computing and exchanging", area="Algorithms")
@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [("ssp", {}), ("n-softsync", {}), ("asgd", {"tasks": "static"}), ("dc-asgd-a", {}), ("dc-asgd-k", {})],
)
def test_whatever_takes_no_barrier_overlaps_and_loses_nothing(line, algorithm, overrides):
    overrides = {**overrides, "overlap": 1}
    outcome = train(regression(0.0), *line, algorithm=algorithm, batch_size=BATCH, epochs=2, overrides=overrides)
    assert [(epoch["steps"], epoch["samples"]) for epoch in outcome.epochs] == [(STEPS, ROWS)] * 2
    assert staleness_of(outcome) == {"0": 2, "1": 2 * (STEPS - 1)}  # each epoch begins with fresh weights


def test_no_step_runs_ahead_of_a_bound_of_zero(line):
    overrides = {"overlap": 1, "staleness_bound": 0}
    outcome = train(regression(0.0), *line, algorithm="ssp", batch_size=BATCH, overrides=overrides)
    assert staleness_of(outcome) == {"0": STEPS}
