"""Models, layers, losses and metrics as users write them in their scripts."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

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
    """Loss as users write it, without ``get_config``."""

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
    """Activation with the name of Keras' own but other values."""
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


class Block(layers.Layer):
    """Layer that takes a layer and a function: Keras cannot serialise it."""

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
    """Model that takes models, as autoencoders and GANs do, keeps lists, and has its own ``train_step``."""

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


class LayerStack(keras.Sequential):
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
