"""Models that ``get_config`` does not describe: state that a script gave them after, or besides, their constructors."""

from __future__ import annotations

import itertools
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

FACTOR = 2.0
_counter = itertools.count(3)


class Holder:
    """Plain object that a layer keeps."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.layers: list[Any] = []

    def __call__(self, x: Any) -> Any:
        return x * self.factor


class Stack(keras.Model):
    """Model whose layers lie in a plain list, a dictionary and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Any] = []
        self.named: dict[str, Any] = {"a": layers.Dense(4)}
        self.pairs = (layers.Dense(4), [layers.Dense(4)])
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        for name in sorted(self.named):
            x = self.named[name](x)
        return self.last(self.pairs[1][0](self.pairs[0](x)))


class Plain(keras.Model):
    """Model of a hidden layer, which computes with any attribute of it, and dropout."""

    def __init__(self, inner: Any = None, rate: float = 0.0) -> None:
        super().__init__()
        self.inner = inner or layers.Dense(4, "tanh")
        self.dropout = layers.Dropout(rate, seed=1)
        self.last = layers.Dense(1)
        self.factor = 1.0

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.dropout(self.inner(x), training=training)) * self.factor


class Scale(layers.Layer):
    """Layer whose configuration is that of its base: neither the factor nor the units."""

    def __init__(self, units: int = 4, factor: float = 1.0) -> None:
        super().__init__()
        self._size, self.scale = units, factor

    def get_config(self) -> dict[str, Any]:
        return {}

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self._size), name="kernel")

    def call(self, x: Any) -> Any:
        return ops.matmul(x, self.kernel) * self.scale


class WrongConfig(Scale):
    """Layer whose configuration states other values than it has."""

    def get_config(self) -> dict[str, Any]:
        return {"units": 4, "factor": 10.0}


class Nameless(layers.Layer):
    """Layer whose configuration lacks the name, and whose constructor does not accept one."""

    def __init__(self, units: int) -> None:
        super().__init__(name="renamed")
        self.dense = layers.Dense(units, name="within")

    def get_config(self) -> dict[str, Any]:
        return {"units": self.dense.units}

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Applies(layers.Layer):
    """Layer that holds a function, an object, and layers of its list."""

    def __init__(self, function: Callable[[Any], Any], holder: Holder) -> None:
        super().__init__()
        self.function, self.holder = function, holder

    def build(self, shape: Any) -> None:
        self.parts = [layers.Dense(4, name=f"part{i}") for i in range(int(self.holder.factor))]
        for part in self.parts:
            part.build(shape)

    def call(self, x: Any) -> Any:
        return sum(self.function(part(x)) for part in self.parts) + self.holder(x)


class Projection(layers.Layer):
    """Layer with a constant that its constructor draws."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = np.random.default_rng().normal(size=(4, 4)).astype("float32")
        self.constant = ops.convert_to_tensor(np.random.default_rng().normal(size=(4,)).astype("float32"))

    def call(self, x: Any) -> Any:
        return ops.matmul(x, self.matrix) + self.constant


class Counted(layers.Layer):
    """Layer whose constructor depends on how many were made before."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(next(_counter))

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Noise(layers.Layer):
    """Layer with a part that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.0

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.strength if training else x


class NamedAsTracking(layers.Layer):
    """Layer whose attribute begins as those of TensorFlow's tracking do."""

    def build(self, shape: Any) -> None:
        self._self_attention = layers.Dense(shape[-1])
        self._self_attention.build(shape)

    def call(self, x: Any) -> Any:
        return self._self_attention(x)


class Shares(layers.Layer):
    """Layer that uses a layer of another one."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared

    def call(self, x: Any) -> Any:
        return self.shared(x) * 0.5


class Locked(layers.Layer):
    """Layer with something that no other process can have; its configuration is complete."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units, self.lock, self.factor = units, threading.Lock(), 1.0
        self.dense = layers.Dense(units)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}

    def call(self, x: Any) -> Any:
        with self.lock:
            return self.dense(x) * self.factor


class OfItsMachine(layers.Layer):
    """Layer that computes with an environment variable."""

    def call(self, x: Any) -> Any:
        return x * float(os.environ.get("NFDT_TEST_FACTOR", "1"))


class Random(layers.Layer):
    """Layer that draws or counts in every call, also without training."""

    def __init__(self, *, repeatable: bool) -> None:
        super().__init__()
        self.repeatable = repeatable

    def call(self, x: Any) -> Any:
        if self.repeatable:
            return x + keras.random.normal((4,)) + float(np.random.normal())
        return x * float(next(_counter))


class Cell(layers.Layer):
    """Recurrent cell without a configuration."""

    def __init__(self, size: int, decay: list[float]) -> None:
        super().__init__()
        self.state_size, self.memory = size, decay
        self.dense = layers.Dense(size)

    def build(self, shape: Any) -> None:
        self.dense.build((shape[0], shape[-1] + self.state_size))

    def call(self, x: Any, states: Any) -> Any:
        new = ops.tanh(self.dense(ops.concatenate([x, states[0]], -1))) * self.memory[0]
        return new, [new]


class Scaled(keras.losses.Loss):
    """Loss with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__(name="scaled")
        self.factor = 1.0

    def call(self, y: Any, prediction: Any) -> Any:
        return ops.mean(ops.square(y - prediction), -1) * self.factor


class SlowSgd(keras.optimizers.SGD):
    """Optimizer with an attribute that its configuration lacks."""

    def __init__(self, learning_rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(learning_rate, **kwargs)
        self.factor = 1.0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)


class ClassFactor(layers.Layer):
    """Layer that computes with an attribute of its class and a global of its module."""

    factor = 1.0

    def call(self, x: Any) -> Any:
        return x * self.factor * FACTOR


class Deep(keras.Sequential):
    """Sequential model with a constructor and an attribute of its own."""

    def __init__(self, width: int) -> None:
        super().__init__([layers.Dense(width), layers.Dense(1)])
        self.factor = 1.0

    def call(self, x: Any, **kwargs: Any) -> Any:
        return super().call(x, **kwargs) * self.factor


class GraphWith(keras.Model):
    """Functional model with a constructor and an attribute of its own."""

    def __init__(self, width: int) -> None:
        inputs = keras.Input((4,))
        super().__init__(inputs, layers.Dense(1)(layers.Dense(width)(inputs)))
        self.factor = 1.0

    def call(self, x: Any) -> Any:
        return super().call(x) * self.factor


def changed(obj: Any, **attributes: Any) -> Any:
    """Set attributes of an object and return it."""
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


def _appended() -> Any:
    model = Stack()
    model.blocks.append(layers.Dense(4, "relu"))
    model.blocks.append(Scale(4))
    model.named["b"] = layers.Dense(4)
    return model


def _hidden_in_an_object() -> Any:
    holder = Holder(2.0)
    fixed = layers.Dense(4)
    fixed.build((None, 4))
    holder.layers.append(fixed)
    return Plain(Applies(lambda x: holder.layers[0](x), holder))


def _dropout_rate() -> Any:
    model = Plain(rate=0.1)
    model.dropout.rate = 0.5
    return model


def _shared_by_parents() -> Any:
    shared = layers.Dense(4)
    return keras.Sequential([Shares(shared), Shares(shared), layers.Dense(1)])


def _two_graphs() -> Any:
    inputs = keras.Input((4,))
    dense = layers.Dense(4)
    model = Plain(keras.Model(inputs, dense(inputs)))
    model.other = keras.Model(inputs, [dense(inputs)])
    return model


def _replaced_call() -> Any:
    dense = layers.Dense(4)
    inner = dense.call
    dense.call = types.MethodType(lambda self, x, training=None: inner(x) * 3.0, dense)
    return keras.Sequential([dense, layers.Dense(1)])


def _replaced_train_step() -> Any:
    model = keras.Sequential([layers.Dense(4), layers.Dense(1)])

    def train_step(self: Any, data: Any) -> Any:
        return keras.Sequential.train_step(self, (data[0] * 2.0, data[1]))

    model.train_step = types.MethodType(train_step, model)
    return model


def _tied() -> Any:
    first, second = layers.Dense(4), layers.Dense(4)
    model = keras.Sequential([keras.Input((4,)), first, second, layers.Dense(1)])
    second._tracker.unlock()
    second._kernel = first._kernel
    second._trainable_variables[:] = [first._kernel, second.bias]
    return model


def _regularizer_after_build() -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1)])
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
    model.layers[1].kernel_regularizer = keras.regularizers.L2(0.1)
    return model


def _constraint_after_build() -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1)])
    model.layers[0].kernel.constraint = keras.constraints.NonNeg()
    return model


def _units_after_the_constructor() -> Any:
    layer = Scale(4)
    layer._size = 7
    return Plain(layer)


def _momentum() -> Any:
    model = keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(1)])
    model.layers[1].momentum = 0.5
    model.layers[2].rate = 0.0
    return model


def _class_factor() -> Any:
    ClassFactor.factor = 3.0
    return Plain(ClassFactor())


def _recurrent() -> Any:
    reshape = layers.Reshape((2, 2))
    return keras.Sequential([reshape, layers.RNN(Cell(3, [0.5])), layers.Dense(1)])


def _trained_with(model: Any, **options: Any) -> Any:
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **options})
    return model


def _bare() -> Any:
    return keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])


MODELS: dict[str, Callable[[], Any]] = {
    "layers appended to a list, put into a dictionary and a tuple": _appended,
    "layers in an object that Keras does not see": _hidden_in_an_object,
    "rate of a dropout changed": _dropout_rate,
    "attribute of a model changed": lambda: changed(Plain(), factor=3.0),
    "attribute of a layer changed": lambda: Plain(changed(Scale(4), scale=3.0)),
    "constructor arguments missing in the configuration": lambda: Plain(Scale(6, 0.5)),
    "wrong configuration": lambda: Plain(WrongConfig(5, 0.5)),
    "configuration without a name": lambda: Plain(Nameless(4)),
    "functions and objects in a layer": lambda: Plain(Applies(lambda x: x * FACTOR, Holder(2.0))),
    "object in a layer changed": lambda: Plain(Applies(ops.tanh, changed(Holder(2.0), factor=3.0))),
    "units changed before build": _units_after_the_constructor,
    "constants that the constructor draws": lambda: Plain(Projection()),
    "constructor that counts": lambda: Plain(Counted()),
    "attribute that only training uses": lambda: Plain(changed(Noise(), strength=1.0)),
    "attribute named as those of TensorFlow's tracking": lambda: Plain(NamedAsTracking()),
    "layer shared by two parents": _shared_by_parents,
    "layer shared by two graphs": _two_graphs,
    "call of one layer replaced": _replaced_call,
    "train_step of one model replaced": _replaced_train_step,
    "weights tied": _tied,
    "regularizer of a variable set after build": _regularizer_after_build,
    "constraint of a variable set after build": _constraint_after_build,
    "options of Keras' own layers changed": _momentum,
    "attribute of a class changed": _class_factor,
    "recurrent cell without a configuration": _recurrent,
    "lock in a layer with a complete configuration": lambda: Plain(changed(Locked(4), factor=2.0)),
    "sequential subclass changed": lambda: changed(Deep(3), factor=2.0),
    "functional subclass changed": lambda: changed(GraphWith(3), factor=2.0),
    "attribute of a loss changed": lambda: _trained_with(_bare(), loss=changed(Scaled(), factor=3.0)),
    "weight decay of the optimizer changed": lambda: _trained_with(
        _bare(), optimizer=changed(keras.optimizers.SGD(0.05), weight_decay=0.1)
    ),
    "attribute of the optimizer changed": lambda: _trained_with(_bare(), optimizer=changed(SlowSgd(0.05), factor=0.5)),
}
"""Makers of the models by a description of what their configuration lacks; ``compile`` is missing in most."""


def make(description: str) -> Any:
    """Return the compiled model of this description, with the same weights each time."""
    keras.utils.set_random_seed(7)
    model = MODELS[description]()
    return model if model.compiled else _trained_with(model)
