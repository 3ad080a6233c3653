"""Second job of the same program in one process: the model and the traces of the first, the result of a new one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.local_cluster import train

pytestmark = pytest.mark.processes

keras = pytest.importorskip("keras")

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 6)).astype("float32"), RNG.integers(0, 3, size=64).astype("int32")


def build(*layers, rate=0.1):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            *layers,
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.5, seed=3, name="drop"),
            keras.layers.Dense(3, activation="softmax", name="out"),
        ],
        name="model",
    )
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.5))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run(model, kept=None, **options):
    return train(model, X, Y, algorithm="bsp", batch_size=8, epochs=2, validation=(X, Y), kept=kept, **options)


def changed(model):
    """Give a model other weights, statistics, seeds and counts, as after another fit."""
    for variable in model.variables:
        if variable.dtype == "float32":
            variable.assign(np.asarray(variable) + 0.25)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(5)
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    seeds[0].assign(np.asarray(seeds[0]) + 11)
    return model


def same(a, b):
    np.testing.assert_array_equal(a.weights, b.weights)
    assert [(e["logs"], e["val_logs"]) for e in a.epochs] == [(e["logs"], e["val_logs"]) for e in b.epochs]
    for one, other in zip(a.untrained, b.untrained, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_second_job_uses_the_traces_of_the_first_and_equals_a_new_model():
    kept, model = {}, build()
    run(model, kept)
    first = kept["worker-0"]
    warm = run(changed(model), kept)
    assert kept["worker-0"].step is first.step
    assert first.step.traces == 1
    same(warm, run(model))


def test_the_number_of_a_worker_decides_its_seeds_and_not_its_process():
    kept, model = {}, build()
    run(model, kept, workers=2)
    warm = run(model, {"worker-0": kept["worker-1"]})
    same(warm, run(model))


@pytest.mark.parametrize("other", [{"rate": 0.2}, {"layers": 1}], ids=str)
def test_another_program_is_built_anew(other):
    kept = {}
    run(build(), kept)
    first = kept["worker-0"]
    extra = [keras.layers.Dense(4, name="extra")] * other.get("layers", 0)
    warm = run(build(*extra, rate=other.get("rate", 0.1)), kept)
    assert kept["worker-0"].step is not first.step
    assert len(warm.epochs) == 2


class Own(keras.layers.Dense):
    """Layer of the script."""


def test_a_layer_of_the_script_is_built_anew():
    kept = {}
    run(build(Own(4, name="own")), kept)
    assert kept["worker-0"] is None


def test_a_layer_that_is_adapted_to_data_is_built_anew():
    kept, layer = {}, keras.layers.Normalization(name="adapted")
    layer.adapt(X)
    run(build(layer), kept)
    assert kept["worker-0"] is None


def test_float16_with_a_loss_scale_is_built_anew():
    kept, model = {}, build()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "sparse_categorical_crossentropy")
    run(model, kept)
    assert kept["worker-0"] is None
