"""A job of one worker takes the samples that Keras alone takes with the same seed, in the same order."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

from tests.support.simulated_jobs import X, Y, build, cluster, simulate

pytestmark = pytest.mark.processes

BATCH, EPOCHS = 7, 4  # 14 batches, the last one of 5 rows
ROUNDING = {"rtol": 1e-4, "atol": 1e-6}


def built(size):
    model = build(momentum=0.0)
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=size)
    return model


def weights_of(model):
    return np.concatenate([np.asarray(variable).reshape(-1) for variable in model.trainable_variables])


def trained(fit):
    """Return the result of a fit, and how often it warned that data are missing."""
    keras.utils.set_random_seed(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit()
    return result, sum("ran out of data" in str(warning.message) for warning in caught)


def compare(algorithm="asgd", *, workers=1, keras_batch=BATCH, size=1, **fit):
    """Train with Keras alone and on a cluster; check that the results are equal."""
    plain, model = built(size), built(size)
    expected, missing = trained(lambda: plain.fit(X, Y, batch_size=keras_batch, epochs=EPOCHS, verbose=0, **fit))
    described = cluster({"count": workers})
    fit["batch_size"] = keras_batch and keras_batch // workers
    (_, _, distributed), warned = trained(lambda: simulate(described, algorithm, model=model, epochs=EPOCHS, **fit))
    history = expected.history
    assert warned == missing
    assert distributed.params == expected.params
    assert distributed.history.keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(distributed.history[name], values, err_msg=name, **ROUNDING)
    np.testing.assert_allclose(weights_of(model), weights_of(plain), **ROUNDING)
    assert int(model.optimizer.iterations) == int(plain.optimizer.iterations)


@pytest.mark.feature("Shuffled as Keras does with the same seed", area="Data")
@pytest.mark.parametrize("algorithm", ["bsp", "asgd", "ddc-asgd"])
@pytest.mark.parametrize("shuffle", [True, "batch", False])
def test_shuffled_arrays_train_one_worker_as_keras_does(algorithm, shuffle):
    compare(algorithm, shuffle=shuffle)


def test_a_round_of_two_workers_is_a_shuffled_batch_of_keras():
    compare("bsp", workers=2, keras_batch=8)


@pytest.mark.parametrize(("steps", "size", "batch"), [(5, 1, 7), (5, 2, 7), (14, 1, 7), (20, 3, 7), (5, 1, None)])
def test_an_epoch_of_limited_steps_goes_on_where_the_last_one_ended(steps, size, batch):
    compare(steps_per_epoch=steps, size=size, keras_batch=batch, shuffle=True)


def test_rounds_of_limited_steps_go_on_as_in_keras():
    compare("bsp", workers=2, keras_batch=8, steps_per_epoch=5)


def numbered(count):
    """Yield so many batches of six rows."""
    return ((X[i : i + 6], Y[i : i + 6]) for i in range(0, 6 * count, 6))


@pytest.mark.parametrize("steps", [None, 3, 12])
def test_a_generator_that_ends_early_trains_as_in_keras(steps):
    plain, model = built(1), built(1)
    options = {"epochs": EPOCHS, "steps_per_epoch": steps, "shuffle": False}
    expected, missing = trained(lambda: plain.fit(numbered(9), verbose=0, **options))
    (_, _, distributed), warned = trained(
        lambda: simulate(cluster({}), "asgd", model=model, x=numbered(9), y=None, **options)
    )
    assert warned == missing > 0
    assert distributed.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(distributed.history[name], values, err_msg=name, **ROUNDING)
    np.testing.assert_allclose(weights_of(model), weights_of(plain), **ROUNDING)
