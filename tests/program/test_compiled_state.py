"""Sequences of compile, fit, freezing and loading: the program trains as the model does."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from keras import layers

x = np.random.default_rng(0).normal(size=(8, 4)).astype("f4")
y = [x.sum(axis=1, keepdims=True), np.eye(3, dtype="f4")[np.arange(8) % 3]]

_MSE = ("compile", {"loss": ["mse", "mse"], "metrics": [["mae"], ["accuracy"]]})
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "loss": st.sampled_from([["mse", "mse"], ["mae", "mse"], [keras.losses.Huber(), "categorical_crossentropy"]]),
        "loss_weights": st.sampled_from([None, [0.5, 2.0]]),
        "metrics": st.sampled_from([[], [["mae"], ["accuracy"]], [[], [keras.metrics.F1Score(name="f1")]]]),
        "weighted_metrics": st.sampled_from([[["mse"], []], [["mae"], ["acc"]]]),
        "steps_per_execution": st.sampled_from([1, 2]),
    },
)
_steps = st.one_of(
    st.tuples(st.just("compile"), _arguments),
    st.tuples(st.sampled_from(["fit", "evaluate", "freeze", "load"]), st.just({})),
)


def two_outputs():
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="relu", name="hidden")(inputs)
    return keras.Model(inputs, [layers.Dense(1, name="a")(hidden), layers.Dense(3, name="b")(hidden)])


def after(model, step, arguments):
    """Return the model after one step of a script."""
    if step == "compile":
        model.compile("sgd", **arguments)
    elif step == "load":
        with tempfile.TemporaryDirectory() as folder:
            model.save(path := Path(folder, "m.keras"))
            model = keras.models.load_model(path)
    elif step == "freeze":  # and the remedy that Keras names
        model.get_layer("hidden").trainable ^= True
        model.compile("sgd")
    elif model._compile_loss is not None:
        getattr(model, step)(x, y, batch_size=4, verbose=0)
    return model


@pytest.mark.processes
@pytest.mark.feature("A `compile` that keeps the loss and the metrics of an earlier one", area="Losses and metrics")
@settings(max_examples=8, suppress_health_check=list(HealthCheck))  # the fixture has no state
@example([_MSE, ("compile", {"loss": ["mse", "mse"]})])
@example([_MSE, ("fit", {}), ("compile", {"loss": ["mse", "mse"]})])
@example([_MSE, ("fit", {}), ("freeze", {}), ("evaluate", {}), ("compile", {"weighted_metrics": [["mse"], []]})])
@example([_MSE, ("load", {}), ("compile", {"loss_weights": [1.0, 0.0]})])
@given(st.lists(_steps, min_size=1, max_size=4).map(lambda steps: [_MSE, *steps]))
def test_any_sequence_trains_as_in_keras(ship, steps):
    keras.utils.set_random_seed(0)
    model = two_outputs()
    for step, arguments in steps:
        model = after(model, step, arguments)
    if model._compile_loss is None:  # it was loaded after a compile without a loss
        model.compile("sgd", ["mse", "mse"])
    arrived = ship(model, (x, tuple(y))).model
    plain = fitted(model)
    assert list(plain) == list(theirs := fitted(arrived))
    for name, values in plain.items():
        np.testing.assert_allclose(theirs[name], values, rtol=1e-5, err_msg=name)


def fitted(model):
    weighted = [np.linspace(0.5, 1, 8), np.ones(8)]
    return model.fit(x, y, sample_weight=weighted, batch_size=4, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize("metrics", ["metrics", "weighted_metrics"])
def test_accuracy_stays_what_the_first_targets_made_of_it(metrics, ship):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    model.compile("sgd", "mse", **{metrics: ["accuracy", "mae"]})
    model.fit(x, y[1], verbose=0)
    model.compile("sgd", "sparse_categorical_crossentropy")
    arrived = ship(model, (x, np.arange(8) % 3)).model
    names = [type(metric).__name__ for metric in arrived._compile_metrics.metrics]
    assert names == [type(metric).__name__ for metric in model._compile_metrics.metrics]
    assert names[0] == "CategoricalAccuracy"


@pytest.mark.parametrize(("name", "value"), [("run_eagerly", True), ("steps_per_execution", 3)])
def test_an_attribute_set_after_compile_counts(name, value, batch, ship):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    setattr(model, name, value)
    assert getattr(ship(model, batch).model, name) == value
