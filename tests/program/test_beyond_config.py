"""Models that ``get_config`` does not describe train on a worker as they train in the script."""

import copy

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from nfdt.core.errors import ModelMismatch
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.pack import pack
from nfdt.model.program.unpack import unpack
from tests.support.models_beyond_config import MODELS, Locked, OfItsMachine, Plain, Random, make

pytestmark = pytest.mark.processes

STEPS = 3
USUAL = (
    "layers in an object that Keras does not see",
    "rate of a dropout changed",
    "constructor arguments missing in the configuration",
    "functions and objects in a layer",
    "constants that the constructor draws",
    "layer shared by two parents",
    "call of one layer replaced",
    "weights tied",
    "constraint of a variable set after build",
    "recurrent cell without a configuration",
    "sequential subclass changed",
)


@pytest.mark.feature(
    "Attributes and layers that `get_config` lacks",
    "Tied weights",
    "Methods replaced on one layer or model",
    "Recurrent cells of the script",
    area="Models",
)
@pytest.mark.parametrize(
    "description", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.long) for name in MODELS]
)
def test_the_worker_trains_the_model_of_the_script(description, batch, ship):
    model = make(description)
    arrived = ship(model, batch).model
    assert [v.path for v in arrived.variables] == [v.path for v in model.variables]
    assert [v.trainable for v in arrived.variables] == [v.trainable for v in model.variables]
    for _ in range(STEPS):
        model.train_on_batch(*batch)
        arrived.train_on_batch(*batch)
    for mine, theirs in zip(model.variables, arrived.variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), mine.numpy(), rtol=1e-5, atol=1e-6, err_msg=mine.path)


def compiled(model):
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def rebuilt(packed, **changes):
    manifest = Manifest.from_bytes(packed.manifest.to_bytes()).replaced(**changes)
    return unpack(manifest, packed.artifacts.__getitem__, allow_code=packed.code)


def jax_call(params, inputs, training):
    return jax.numpy.tanh(inputs @ params["w"]) * (0.5 if training else 1.0)


def jax_init(rng, inputs, training):
    return {"w": jax.random.normal(rng, (inputs.shape[-1], 3))}


@pytest.mark.feature("`JaxLayer` and `FlaxLayer`, also on TensorFlow", area="Models")
def test_a_layer_of_jax_functions_trains_as_in_the_script(batch, ship):
    wrapped = layers.JaxLayer(jax_call, jax_init, seed=1)
    model = compiled(keras.Sequential([keras.Input((4,)), wrapped, layers.Dense(1)]))
    arrived = ship(model, batch).model
    assert [v.path for v in arrived.variables] == [v.path for v in model.variables]
    for one in (model, arrived):
        one.train_on_batch(*batch)
    for mine, theirs in zip(model.variables, arrived.variables, strict=True):
        np.testing.assert_allclose(theirs.numpy(), mine.numpy(), rtol=1e-5, atol=1e-6, err_msg=mine.path)
    np.testing.assert_allclose(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0), rtol=1e-5)


@pytest.mark.feature(
    "Layers that compute with something of their machine",
    area="Models",
    status="refused",
    note="`ModelMismatch`, before training",
)
def test_a_layer_that_computes_with_its_machine_ends_before_training(batch, monkeypatch):
    packed = pack(compiled(Plain(OfItsMachine())), batch)
    rebuilt(packed)
    monkeypatch.setenv("NFDT_TEST_FACTOR", "1.5")
    with pytest.raises(ModelMismatch, match="same samples.*All plain attributes of its layers are equal"):
        rebuilt(packed)


def test_the_message_names_the_first_layer_and_attribute_that_differ(batch):
    model = keras.Sequential([keras.Input((4,)), layers.LeakyReLU(0.3, name="leaky"), layers.Dense(1)])
    packed = pack(compiled(model), batch)
    assert not packed.code
    other = copy.deepcopy(packed.manifest.model)
    leaky = next(layer for layer in other["config"]["layers"] if layer["config"]["name"] == "leaky")
    leaky["config"]["negative_slope"] = 0.1
    with pytest.raises(ModelMismatch, match="'leaky': its attribute 'negative_slope' is 0.3 .* 0.1 here"):
        rebuilt(packed, model=other)


def test_a_model_of_mappings_is_described_without_the_containers_of_tensorflow(batch):
    one = keras.Input((4,), name="one")
    model = keras.Model({"one": one}, {"two": layers.Dense(1, name="two")(one)})
    model.compile("sgd", {"two": "mse"})
    x, y = batch[0], batch[1]
    rebuilt(pack(model, ({"one": x}, {"two": y})))


def test_other_weights_than_those_of_the_program_are_not_compared(batch, monkeypatch):
    packed = pack(compiled(Plain(OfItsMachine())), batch)
    monkeypatch.setenv("NFDT_TEST_FACTOR", "1.5")
    state = packed.artifacts[packed.manifest.state]
    unpack(packed.manifest.replaced(state="later"), {**packed.artifacts, "later": state}.__getitem__, allow_code=True)


def test_random_numbers_have_the_same_seeds_and_the_scripts_generators_go_on(batch):
    model = compiled(Plain(Random(repeatable=True)))
    pack(model, batch)  # builds it, which draws
    np.random.seed(3)
    expected = np.random.normal(size=3)
    np.random.seed(3)
    packed = pack(model, batch)
    np.testing.assert_array_equal(np.random.normal(size=3), expected)
    assert packed.manifest.check is not None
    rebuilt(packed)


def test_outputs_that_do_not_repeat_are_not_compared(batch):
    packed = pack(compiled(Plain(Random(repeatable=False))), batch)
    assert packed.manifest.check is None
    rebuilt(packed)


def test_the_check_leaves_the_model_as_it_was(batch):
    model = compiled(Plain(layers.BatchNormalization(), rate=0.5))
    pack(model, batch)
    before = [variable.numpy() for variable in model.variables]
    pack(model, batch)
    for value, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_what_a_constructor_makes_again_is_made_on_the_worker(batch, ship):
    layer = Locked(4)
    arrived = ship(compiled(Plain(layer)), batch).model
    assert arrived.inner.lock is not layer.lock
    assert arrived.inner.lock.acquire(blocking=False)


@pytest.mark.parametrize(
    "layer",
    [
        layers.SpectralNormalization(layers.Dense(3)),
        layers.BatchNormalization(),
        layers.Dense(3, kernel_regularizer="l2", bias_constraint="non_neg", activity_regularizer="l1"),
        keras.Sequential([layers.Reshape((2, 2)), layers.Bidirectional(layers.LSTM(2, dropout=0.1))]),
        keras.Sequential([layers.Dense(2), layers.GaussianNoise(0.1)]),
    ],
    ids=lambda layer: layer.name,
)
def test_what_a_configuration_describes_needs_no_code(layer, batch):
    packed = pack(compiled(keras.Sequential([layer, layers.Dense(1)])), batch)
    assert not packed.code
    rebuilt(packed)


def described(description, batch):
    keras.backend.clear_session()  # names begin again, as in another process
    manifest = pack(make(description), batch).manifest
    return manifest.sources, manifest.compilation(), manifest.architecture()


def test_two_processes_describe_the_same_program_alike(batch):
    first, second = (described("attribute of a layer changed", batch) for _ in range(2))
    assert first == second
    assert first[2] != described("constructor arguments missing in the configuration", batch)[2]


class Counts(layers.Layer):
    """Layer that adds numbers from lookup tables of TensorFlow, which it gets after its constructor."""

    def call(self, x):
        word, number = self.words.lookup(tf.constant(["b", "absent"])), self.numbers.lookup(tf.constant([7], "int64"))
        return x + sum(map(tf.reduce_sum, (word, number, self.empty.lookup(tf.constant([1])))))


@pytest.mark.feature("Lookup tables of TensorFlow in a layer", area="Models")
def test_lookup_tables_travel_with_what_they_hold(batch, ship):
    layer = Counts()
    words = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0])
    layer.words = tf.lookup.StaticHashTable(words, default_value=0.5)
    layer.numbers = tf.lookup.experimental.MutableHashTable("int64", "float32", -1.0)
    layer.numbers.insert(tf.constant([7], "int64"), tf.constant([3.0]))
    layer.empty = tf.lookup.experimental.MutableHashTable("int32", "float32", -1.0)
    model = compiled(keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)]))
    arrived = ship(model, batch).model
    np.testing.assert_allclose(arrived.layers[0](batch[0]), batch[0] + 4.5, rtol=1e-5)
