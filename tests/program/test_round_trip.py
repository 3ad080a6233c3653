"""What is packed comes back as the same model: predictions, losses, metrics, optimizer, flags."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.core.program.pack import pack
from nfdt.core.program.state import load_state

SCALE = 3.0


class Scaled(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x):
        return SCALE * x @ self.kernel


class Subclassed(keras.Model):
    def __init__(self, hidden, rate=0.5):
        super().__init__()
        self.hidden = layers.Dense(hidden, activation="relu")
        self.drop = layers.Dropout(rate)
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.drop(self.hidden(x), training=training))


class CustomStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        return {"twice": 2 * loss}


class CustomCompile(Subclassed):
    def compile(self, optimizer, reconstruction, weight=1.0):
        super().compile(optimizer=optimizer, loss="mse")
        self.reconstruction, self.weight = reconstruction, weight
        self.mine = optimizer
        self.tracker = keras.metrics.Mean(name="tracker")


class Huber(keras.losses.Loss):
    """As people write them: no get_config."""

    def __init__(self, threshold=1.0):
        super().__init__(name="my_huber")
        self.threshold = threshold

    def call(self, y, pred):
        return keras.ops.mean(keras.ops.minimum(keras.ops.square(y - pred), self.threshold), -1)


class Largest(keras.metrics.Metric):
    def __init__(self, power, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.power = power
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y, pred, sample_weight=None):
        self.value.assign(keras.ops.max(pred) ** self.power)

    def result(self):
        return self.value


def absolute(y, pred):
    return keras.ops.mean(keras.ops.abs(y - pred), -1)


def swish(x):
    """Named as Keras' own, but not the same."""
    return x * 0.1


def sequential():
    return keras.Sequential(
        [layers.Dense(5, "relu"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
    )


def functional():
    a = keras.Input((4,), name="a")
    shared = layers.Dense(4, name="shared")
    x = keras.ops.relu(shared(a)) + shared(a * 2.0)
    return keras.Model(a, layers.Dense(1)(layers.Concatenate()([x, a])))


def custom_layer():
    return keras.Sequential(
        [Scaled(5), layers.Dense(4, activation=swish), layers.Dense(1, activation=lambda z: z * SCALE)]
    )


def lambda_layer():
    return keras.Sequential([layers.Lambda(lambda z: z * SCALE + np.pi), layers.Dense(1)])


def frozen():
    model = sequential()
    model.layers[0].trainable = False
    return model


MODELS = [sequential, functional, lambda: Subclassed(6), custom_layer, lambda_layer, frozen]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("loss", ["mse", absolute, Huber(0.2), lambda y, p: absolute(y, p) * 2])
def test_model_and_loss_come_back(make, loss, batch, ship):
    model = make()
    model.compile("adam", loss, metrics=["mae", absolute, Largest(2)], weighted_metrics=["mse"])
    arrived = ship(model, batch).model
    np.testing.assert_array_equal(arrived.predict(batch[0], verbose=0), model.predict(batch[0], verbose=0))
    assert arrived.evaluate(*batch, verbose=0, return_dict=True) == model.evaluate(*batch, verbose=0, return_dict=True)
    assert [v.trainable for v in arrived.variables] == [v.trainable for v in model.variables]


def test_only_keras_means_no_code(batch, ship):
    model = functional()
    model.compile(keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10)), keras.losses.Huber())
    arrived = ship(model, batch)
    assert not arrived.packed.code
    assert arrived.manifest["code"] is None


def test_a_custom_train_step_travels(batch, ship):
    model = CustomStep(3)
    model.compile("sgd", "mse")
    assert set(ship(model, batch).model.fit(*batch, verbose=0).history) == {"twice"}


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
    assert arrived.manifest["loss_scale"] == expected
    assert arrived.manifest["optimizer"]["class_name"] == "SGD"


def test_the_state_of_a_trained_model_travels(batch, ship):
    model = sequential()
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, "mse")
    for _ in range(3):
        model.train_on_batch(*batch)
    optimizer.learning_rate = 0.125
    arrived = ship(model, batch)
    state = load_state(arrived.packed.artifacts[arrived.manifest["state"]])
    for index, variable in enumerate(optimizer.variables):
        np.testing.assert_array_equal(state.optimizer[index], variable.numpy())
    assert (int(state.optimizer[0]), float(state.optimizer[1])) == (3, 0.125)
    assert int(arrived.model.optimizer.iterations) == 3
    layout = ParameterLayout.from_json(arrived.manifest["layout"])
    np.testing.assert_array_equal(state.weights, layout.flatten([v.numpy() for v in model.trainable_variables]))
    for a, b in zip(arrived.model.non_trainable_variables, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert sorted(entry["rule"] for entry in arrived.manifest["untrained"]) == ["ema", "ema", "seed"]


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


class NeedsConfig(layers.Dense):
    def __init__(self, secret):
        super().__init__(len(secret))


class BadConfig(Subclassed):
    def get_config(self):
        return {"hidden": self.nowhere}


class Block(layers.Layer):
    """Takes a layer and a function: Keras cannot serialise it."""

    def __init__(self, inner, function, shape=(2, 3)):
        super().__init__(name="my_block")
        self.inner, self._function, self.shape = inner, function, shape
        self.bias = self.add_weight(shape=(1,), name="bias")

    def build(self, shape):
        self.extra = layers.Dense(2)
        self.extra.build((shape[0], 4))
        self.kernel = self.add_weight(shape=(4, 1), name="kernel")

    def call(self, x):
        assert self.shape == (2, 3)
        return self._function(self.inner(x) + self.bias) + x @ self.kernel + keras.ops.sum(self.extra(x))


class Auto(keras.Model):
    """Takes models, as autoencoders and GANs do, keeps lists, and trains in its own way."""

    def __init__(self, encoder, heads, rate, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.heads = [layers.Dense(n) for n in heads]
        for index in range(2):
            setattr(self, f"side{index}", layers.Dense(1, name=f"side{index}"))
        self.rate = rate
        self.again = encoder
        self.loss_tracker = keras.metrics.Mean(name="mine")
        self.names = {"a": [1, (2, 3)]}

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        h = self.encoder(x)
        assert self.names == {"a": [1, (2, 3)]}
        return (
            sum(keras.ops.sum(head(h), -1, keepdims=True) for head in self.heads)
            + self.side0(h)
            + self.side1(h) * self.rate
        )


class Chain(keras.Sequential):
    def __init__(self, units):
        super().__init__([layers.Dense(n) for n in units])
        self.factor = len(units)

    def call(self, x):
        return super().call(x) * self.factor


class Graph(keras.Model):
    def __init__(self, units, factor):
        inputs = keras.Input((4,))
        dense = layers.Dense(units, name="inner")
        super().__init__(inputs, layers.Dense(1)(dense(inputs)))
        self.dense, self.factor = dense, factor

    def call(self, x):
        return super().call(x) * self.factor + keras.ops.sum(self.dense(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Auto(keras.Sequential([Scaled(3)]), [1, 2], 0.5, name="auto"),
        lambda: keras.Sequential([Block(layers.Dense(1), lambda x: x * 2), layers.Dense(1)]),
        lambda: Graph(3, 0.25),
        lambda: Chain([3, 1]),
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


class Gan(Subclassed):
    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer


class NeedsArgument(keras.metrics.Metric):
    def __init__(self, secret):
        super().__init__(name="n")

    def update_state(self, y, pred, sample_weight=None):
        pass

    def result(self):
        return 0.0


def compiled(model, **options):
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def gan():
    model = Gan(3)
    model.compile(keras.optimizers.SGD(), keras.optimizers.Adam())
    return model


def unpicklable():
    lock = threading.Lock()

    def guarded(y, pred):
        with lock:
            return absolute(y, pred)

    return compiled(sequential(), loss=guarded)


def refrozen():
    model = compiled(sequential())
    model.fit(np.zeros((2, 4)), np.zeros((2, 1)), verbose=0)
    model.layers[0].trainable = False
    return model


def two_graphs_of_one_layer():
    inputs = keras.Input((4,))
    dense = layers.Dense(1)
    model = Auto(keras.Model(inputs, dense(inputs)), [1], 2)
    model.other = keras.Model(inputs, [dense(inputs)])
    return model


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: compiled(keras.Sequential([NeedsConfig("a")])), CaptureError, "NeedsConfig.*'secret'.*get_config"),
        (lambda: compiled(BadConfig(1)), CaptureError, "BadConfig.*get_config.*nowhere"),
        (lambda: compiled(sequential(), metrics=[NeedsArgument(3)]), CaptureError, "NeedsArgument.*'secret'"),
        (lambda: compiled(two_graphs_of_one_layer()), CaptureError, "'dense.*two models"),
        (gan, CaptureError, "several optimizers.*d_optimizer, g_optimizer"),
        (unpicklable, CaptureError, "'guarded'.*lock"),
        (refrozen, CaptureError, r"compile\(\) again"),
        (sequential, ValueError, "compile"),
        (lambda: compiled(sequential(), optimizer=None), CaptureError, "one Keras optimizer"),
        (lambda: compiled(keras.Sequential([layers.Flatten()])), CaptureError, "nothing to train"),
        (lambda: compiled(keras.Sequential([layers.Dense(1, dtype="float64")])), CaptureError, "float64"),
    ],
)
def test_what_cannot_travel_says_what_and_why(make, error, words, batch):
    with pytest.raises(error, match="(?s)" + words):
        pack(make(), batch)


def test_keras_is_as_it_was_after_packing_even_when_it_fails(batch):
    from keras.src.saving import object_registration, serialization_lib

    before = (serialization_lib.serialize_keras_object, object_registration.get_registered_name)
    lambdas = layers.Lambda._serialize_function_to_config
    with pytest.raises(CaptureError):
        pack(compiled(keras.Sequential([NeedsConfig("a")])), batch)
    assert before == (serialization_lib.serialize_keras_object, object_registration.get_registered_name)
    assert keras.saving.serialize_keras_object is before[0]
    assert layers.Lambda._serialize_function_to_config is lambdas
