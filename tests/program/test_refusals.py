"""Programs that cannot be packed: errors on the client, with the remedy."""

import re
import threading

import keras
import numpy as np
import pytest
from keras import layers

from nfdt.core.errors import CaptureError
from nfdt.model.program.pack import pack
from tests.support.custom_models import Subclassed, absolute, sequential


class Guarded(layers.Layer):
    """Layer that no other process can have, and whose configuration does not make another one."""

    def __init__(self, units, factor):
        super().__init__()
        self.dense, self.times = layers.Dense(units), factor
        self.lock = threading.Lock()

    def get_config(self):
        return {"units": 3}

    def call(self, x):
        return self.dense(x) * self.times


class BadConfig(Guarded):
    def get_config(self):
        return {"units": self.nowhere}


class Updating(Subclassed):
    """Model whose step makes two updates."""

    def train_step(self, data):
        kernel, bias = self.trainable_variables[:2]
        self.update(kernel, bias)
        return {"loss": 0.0}

    def update(self, kernel, bias):
        for variable in (kernel, bias):
            self.optimizer.apply([0 * variable.value], [variable])


OUTSIDE = keras.optimizers.SGD()


class Outside(Updating):
    def train_step(self, data):
        OUTSIDE.apply([data[0]], [data[0]])


class Stranger(Updating):
    def __init__(self, units):
        super().__init__(units)
        self.others = (lambda stranger: lambda: stranger)(keras.Variable(0.0, name="stranger"))

    def update(self, kernel, bias):
        self.optimizer.apply([0.0], [self.others()])


def compiled(model, **options):
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def outside():
    return compiled(Outside(3))


def stranger():
    return compiled(Stranger(3))


def second_part():
    model = compiled(Updating(3))
    model.again = model.optimizer
    model.update = lambda kernel, bias: [model.again.apply([0 * v.value], [v]) for v in (kernel, kernel, bias)]
    return model


def replaced_method_of_one_of_two():
    model = compiled(Updating(3))
    model.other = keras.optimizers.SGD()
    model.other.update_step = lambda gradient, variable, rate: variable.assign_sub(gradient)
    model.update = lambda kernel, bias: model.other.apply([0 * kernel.value], [kernel])
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


def replaced_step():
    optimizer = keras.optimizers.SGD()
    optimizer.update_step = lambda gradient, variable, rate: variable.assign_sub(gradient)
    return compiled(sequential(), optimizer=optimizer)


@pytest.mark.feature(
    "Locks, files or sessions in layers with an incomplete configuration",
    "float64 weights",
    area="Models",
    status="refused",
)
@pytest.mark.feature("Method replaced on one optimizer", area="Optimizers", status="refused", note="write a subclass")
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: compiled(keras.Sequential([Guarded(1, 2)])), CaptureError, "Guarded.*'lock'.*get_config"),
        (lambda: compiled(keras.Sequential([BadConfig(1, 2)])), CaptureError, "BadConfig.*'lock'.*get_config"),
        (replaced_step, CaptureError, "'update_step'.*subclass"),
        (outside, CaptureError, "'OUTSIDE', a variable of the script.*self.OUTSIDE"),
        (stranger, CaptureError, "updates 'stranger', which is not one of the model's"),
        (second_part, CaptureError, "variables of its first update.*Received: an update of '.*bias"),
        (replaced_method_of_one_of_two, CaptureError, "'update_step'.*subclass"),
        (unpicklable, CaptureError, "'loss'.*lock.*'guarded'"),
        (refrozen, CaptureError, r"compile\(\) again"),
        (sequential, ValueError, "compile"),
        (lambda: compiled(sequential(), optimizer=None), CaptureError, "one Keras optimizer"),
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
        pack(replaced_step(), batch)
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
