"""Programs that cannot be packed: errors on the client, with the remedy."""

import re
import threading

import keras
import numpy as np
import pytest
from keras import layers

from nfdt.core.errors import CaptureError
from nfdt.core.program.pack import pack
from tests.support.custom_models import Auto, Subclassed, absolute, sequential


class NeedsConfig(layers.Dense):
    def __init__(self, secret):
        super().__init__(len(secret))


class BadConfig(Subclassed):
    def get_config(self):
        return {"hidden": self.nowhere}


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
def test_the_error_of_a_program_that_cannot_be_packed_names_part_and_reason(make, error, words, batch):
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


class Boom(layers.Layer):
    def call(self, x):
        raise RuntimeError("boom in layer")


class OwnStep(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        self.inner(data[0])
        return {"loss": 0.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.Sequential([layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(1)]),
        lambda: keras.Sequential([Boom(), layers.Dense(1)]),
        lambda: keras.Sequential([layers.Dense(2), keras.Sequential([Boom()])]),
        lambda: OwnStep(keras.Sequential([layers.Conv2D(4, 3)])),
        lambda: keras.Sequential([layers.Dense(3), layers.Reshape((2, 2))]),
    ],
    ids=["no channels", "a layer that raises", "nested", "own train_step", "shapes"],
)
def test_errors_of_an_unbuilt_model_are_those_of_keras(make):
    x, y = np.zeros((8, 6, 6), np.float32), np.zeros((8, 6, 1), np.float32)
    messages = []
    for act in (lambda model: model.fit(x, y, batch_size=8, verbose=0), lambda model: pack(model, (x, y))):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            act(compiled(make()))
        messages.append(re.sub(r"_\d+", "", f"{caught.type.__name__}: {caught.value}"))
    assert messages[0] == messages[1]
