"""Layers and variables that each rank trains for itself."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hfdt.keras as hvd
from nfdt.core.errors import UsageError
from tests.support.rank_training import CLASSES, FEATURES, dense_model


def own() -> float:
    return hvd.rank() + 1.0


def mean_over_ranks() -> float:
    return (hvd.size() + 1) / 2


def own_data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank())
    return rng.normal(size=(8, FEATURES)).astype("float32"), rng.integers(0, CLASSES, 8)


def distances(layer: keras.Layer) -> list[float]:
    """Return how far the weights of each rank are from those of this one."""
    mine = np.concatenate([np.ravel(w) for w in layer.get_weights()])
    return [float(np.abs(mine - other).max()) for other in np.asarray(hvd.allgather(mine[None]))]


def train(model: keras.Model, optimizer: keras.Optimizer, **options: object) -> None:
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(*own_data(), batch_size=4, epochs=2, verbose=0, callbacks=callbacks, **options)


@pytest.mark.parametrize("local", [0, 1, 2])
def test_a_layer_is_trained_together_or_local(local):
    model = dense_model()
    optimizer = keras.optimizers.SGD(1.0)
    assert hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[:local]) is optimizer
    train(model, optimizer)
    for number, layer in enumerate(model.layers):
        together = max(distances(layer)) == 0
        assert together == (number >= local)


@pytest.mark.parametrize("scale", [True, False])
def test_gradients_of_a_local_layer_are_divided_by_the_ranks_or_not(scale):
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2)]
    for layer in layers:
        layer.build((None, 1))
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=layers[0], scale_local_gradients=scale
    )
    optimizer.apply([tf.constant([[own()]])] * 2, [layer.kernel for layer in layers])
    local, shared = (float(layer.kernel.numpy()[0, 0]) for layer in layers)
    assert local == pytest.approx(-own() / (hvd.size() if scale else 1))
    assert shared == -mean_over_ranks()


def test_a_layer_that_the_first_batch_builds_is_local():
    layers = [keras.layers.Dense(4), keras.layers.Dense(CLASSES, activation="softmax")]
    model = keras.Sequential(layers)
    train(model, hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=layers[:1]))
    assert max(distances(layers[0])) > 0
    assert max(distances(layers[1])) == 0


def test_without_layers_all_are_trained_together():
    model = dense_model()
    train(model, hvd.PartialDistributedOptimizer("sgd"))
    assert max(distances(model)) == 0


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_sparse_gradients_of_a_local_variable_stay_sparse(graph, scale):
    table = keras.Variable(np.zeros((3, 1), "float32"))
    applied = []

    class Recorded(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            applied.append(type(gradient))
            super().update_step(gradient, variable, learning_rate)

    optimizer = hvd.DistributedOptimizer(Recorded(1.0), scale_local_gradients=scale)
    optimizer.register_local_var(table)
    optimizer.build([table])

    def step(value):
        optimizer.apply([tf.IndexedSlices(value, [2, 2], dense_shape=[3, 1])], [table])

    (tf.function(step) if graph else step)(tf.constant([[own()], [own()]]))
    expected = -2 * own() / (hvd.size() if scale else 1)
    np.testing.assert_allclose(table.numpy()[:, 0], [0, 0, expected])
    assert applied == [tf.IndexedSlices]


@pytest.mark.parametrize("scale", [True, False])
def test_an_overflow_in_a_local_gradient_skips_the_step_on_all_ranks(scale):
    local, shared = keras.Variable([0.0]), keras.Variable([0.0])
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaler, scale_local_gradients=scale)
    optimizer.register_local_var(local)
    optimizer.build([local, shared])
    overflow = float("inf") if hvd.rank() == 0 else 4.0
    optimizer.apply([tf.constant([overflow]), tf.constant([4.0])], [local, shared])
    assert (local.numpy()[0], shared.numpy()[0]) == (0.0, 0.0)
    assert float(scaler.dynamic_scale.numpy()) == 2.0
    optimizer.apply([tf.constant([2.0]), tf.constant([2.0])], [local, shared])
    assert shared.numpy()[0] == -1.0
    assert local.numpy()[0] == pytest.approx(-1.0 / (hvd.size() if scale else 1))


def test_a_norm_over_local_and_common_gradients_is_refused():
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    optimizer.register_local_var(variables[0])
    with pytest.raises(UsageError, match=r"clipnorm or clipvalue. Received: global_clipnorm=1.0"):
        optimizer.apply([tf.constant([1.0])] * 2, variables)


@pytest.mark.parametrize("local", ["a layer", [keras.layers.Dense(1), 7], keras.Variable(1.0)], ids=str)
def test_something_else_than_layers_is_refused(local):
    with pytest.raises(UsageError, match="local_layers to be Keras layers"):
        hvd.PartialDistributedOptimizer("sgd", local_layers=local)


@pytest.mark.parametrize("local", ["a name", 7, keras.layers.Dense(1)], ids=str)
def test_something_else_than_variables_is_refused(local):
    with pytest.raises(UsageError, match="local variables to be Keras variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
    with pytest.raises(UsageError, match="local variables to be Keras variables"):
        hvd.DistributedOptimizer("sgd").register_local_var(local)
