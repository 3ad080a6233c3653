"""Round trip of packed models: the same predictions, losses, metrics, optimizer and flags."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from tests.support.custom_models import (
    Auto,
    Block,
    CustomCompile,
    CustomStep,
    Graph,
    Huber,
    Largest,
    LayerStack,
    Scaled,
    Subclassed,
    absolute,
    custom_layer,
    frozen,
    functional,
    lambda_layer,
    sequential,
)


@pytest.mark.feature("Losses of Keras and of the script, as classes and functions", area="Losses and metrics")
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (sequential, "mse"),
        (functional, absolute),
        (lambda: Subclassed(6), Huber(0.2)),
        (custom_layer, lambda y, p: absolute(y, p) * 2),
        (lambda_layer, keras.losses.LogCosh()),
        (frozen, Huber(0.2)),
    ],
)
def test_model_and_loss_come_back(make, loss, batch, ship):
    model = make()
    model.compile("adam", loss, metrics=["mae", absolute, Largest(2)], weighted_metrics=["mse"])
    arrived = ship(model, batch).model
    np.testing.assert_array_equal(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))
    assert arrived.evaluate(*batch, verbose=0, return_dict=True) == model.evaluate(*batch, verbose=0, return_dict=True)
    assert [v.trainable for v in arrived.variables] == [v.trainable for v in model.variables]


@pytest.mark.feature("Sequential, functional and subclassed models of Keras' own layers, without code", area="Models")
def test_only_keras_means_no_code(batch, ship):
    model = functional()
    model.compile(keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10)), keras.losses.Huber())
    arrived = ship(model, batch)
    assert not arrived.packed.code
    assert arrived.manifest.code is None


@pytest.mark.feature("Custom `train_step`", area="Models")
def test_a_custom_train_step_travels(batch, ship):
    model = CustomStep(3)
    model.compile("sgd", "mse")
    assert set(ship(model, batch).model.fit(*batch, verbose=0).history) == {"twice"}


@pytest.mark.feature("Custom `compile`", area="Models")
def test_an_overridden_compile_is_restored(batch, ship):
    model = CustomCompile(3)
    model.compile(keras.optimizers.SGD(0.25), absolute, weight=7)
    arrived = ship(model, batch).model
    assert arrived.weight == 7
    assert arrived.mine is arrived.optimizer
    assert float(arrived.optimizer.learning_rate) == 0.25
    assert float(keras.ops.mean(arrived.reconstruction(np.ones((2, 1)), np.zeros((2, 1))))) == 1.0
    assert arrived.tracker.name == "tracker"
    np.testing.assert_array_equal(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))


@pytest.mark.feature("Several inputs and outputs, with losses and weights by name", area="Models")
def test_outputs_losses_and_weights_by_name(ship):
    a = keras.Input((4,), name="a")
    b = keras.Input((2,), name="b")
    h = layers.Dense(3)(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"p": layers.Dense(1, name="p")(h), "q": layers.Dense(2, name="q")(h)})
    model.compile(
        "rmsprop", {"p": "mse", "q": absolute}, loss_weights={"p": 0.5, "q": 2.0}, metrics={"p": ["mae"], "q": ["mse"]}
    )
    x = {"a": np.ones((6, 4), "f4"), "b": np.ones((6, 2), "f4")}
    y = {"p": np.ones((6, 1), "f4"), "q": np.ones((6, 2), "f4")}
    arrived = ship(model, (x, y)).model
    assert arrived.evaluate(x, y, verbose=0, return_dict=True) == model.evaluate(x, y, verbose=0, return_dict=True)


@pytest.mark.feature("Mixed precision: float16 and bfloat16 policies", area="Models")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_set_globally_reaches_layers_made_in_a_constructor(policy, batch, ship):
    keras.config.set_dtype_policy(policy)
    try:
        model = Subclassed(4)
        model.compile(keras.optimizers.SGD(0.5))
        arrived = ship(model, batch)
    finally:
        keras.config.set_dtype_policy("float32")
    assert arrived.model.hidden.dtype_policy.name == policy
    assert type(arrived.model.optimizer) is type(model.optimizer)
    expected = {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000} if policy == "mixed_float16" else None
    assert arrived.manifest.loss_scale == expected
    assert arrived.manifest.optimizer_class == "SGD"


def test_the_state_of_a_trained_model_travels(batch, ship):
    model = sequential()
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, "mse")
    for _ in range(3):
        model.train_on_batch(*batch)
    optimizer.learning_rate = 0.125
    arrived = ship(model, batch)
    state = load_state(arrived.packed.artifacts[arrived.manifest.state])
    for index, variable in enumerate(optimizer.variables):
        np.testing.assert_array_equal(state.optimizer[index], variable.numpy())
    assert (int(state.optimizer[0]), float(state.optimizer[1])) == (3, 0.125)
    assert int(arrived.model.optimizer.iterations) == 3
    layout = arrived.manifest.layout
    np.testing.assert_array_equal(state.weights, layout.flatten([v.numpy() for v in model.trainable_variables]))
    for a, b in zip(arrived.model.non_trainable_variables, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert sorted(entry["rule"] for entry in arrived.manifest.untrained) == ["ema", "ema", "seed"]


def test_code_that_refers_to_the_model_refers_to_the_workers_model(batch, ship):
    model = sequential()

    def loss(y, pred):
        return (
            absolute(y, pred) + keras.ops.sum(model.layers[0].kernel ** 2) + 0 * keras.ops.sum(model(y * [[1.0] * 4]))
        )

    model.compile("sgd", loss)
    arrived = ship(model, batch).model
    arrived.layers[0].kernel.assign(np.zeros((4, 5)))
    model.layers[0].kernel.assign(np.zeros((4, 5)))
    np.testing.assert_allclose(arrived.evaluate(*batch, verbose=0), model.evaluate(*batch, verbose=0))


def test_a_keras_object_in_a_closure_travels_with_its_weights(batch, ship):
    other = keras.Sequential([keras.Input((1,)), Scaled(2)])

    def distance(y, pred):
        return keras.ops.mean(keras.ops.square(other(y) - other(pred)), -1)

    model = sequential()
    model.compile("sgd", distance)
    arrived = ship(model, batch).model
    np.testing.assert_allclose(arrived.evaluate(*batch, verbose=0), model.evaluate(*batch, verbose=0), rtol=1e-6)


@pytest.mark.feature("Preprocessing layers with vocabularies and adapted statistics", area="Models")
def test_vocabularies_and_adapted_statistics_travel(ship):
    words = layers.TextVectorization(output_sequence_length=3)
    words.adapt(["a b c", "b c d"])
    text = keras.Input((1,), dtype="string")
    model = keras.Model(text, layers.Dense(1)(layers.Flatten()(layers.Embedding(9, 2)(words(text)))))
    model.compile("sgd", "mse")
    x, y = np.asarray([["a b"], ["d c"]], object), np.ones((2, 1), "f4")
    arrived = ship(model, (x, y))
    assert not arrived.packed.code
    x = tf.constant([["a b"], ["d c"]])
    np.testing.assert_array_equal(arrived.model.predict(x, verbose=0), model.predict(x, verbose=0))


def test_normalization_computes_with_the_statistics_that_travelled(batch, ship):
    norm = layers.Normalization()
    norm.adapt(batch[0] * 7 + 3)
    model = keras.Sequential([norm, layers.Dense(1)])
    model.compile("sgd", "mse")
    arrived = ship(model, batch).model
    np.testing.assert_array_equal(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))


def test_same_names_stay_apart(batch, ship):
    def make(factor):
        def act(x):
            return x * factor

        return act

    model = keras.Sequential([layers.Dense(4, make(2.0)), layers.Dense(4, make(5.0)), layers.Dense(1, lambda x: x + 1)])
    model.compile("sgd", lambda y, p: absolute(y, p))
    arrived = ship(model, batch).model
    np.testing.assert_array_equal(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Auto(keras.Sequential([Scaled(3)]), [1, 2], 0.5, name="auto"),
        lambda: keras.Sequential([Block(layers.Dense(1), lambda x: x * 2), layers.Dense(1)]),
        lambda: Graph(3, 0.25),
        lambda: LayerStack([3, 1]),
    ],
)
def test_what_keras_cannot_serialise_travels_by_its_parts(make, batch, ship):
    model = make()
    model.compile("sgd", "mse")
    arrived = ship(model, batch).model
    assert arrived.name == model.name
    assert [v.name for v in arrived.variables] == [v.name for v in model.variables]
    np.testing.assert_array_equal(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))
    model.train_on_batch(*batch)
    np.testing.assert_array_equal(ship(model, batch).model.predict(batch[0]), model.predict(batch[0]))


def test_layers_that_the_script_makes_later_have_the_seeds_they_have_in_keras(batch):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seeds = random.getstate()
    pack(model, batch)
    assert random.getstate() == seeds
