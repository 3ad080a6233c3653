"""Models whose loss, call or trainable weights are missing or elsewhere, as in users' scripts; also part of scripts."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

WIDTH = 8
ROWS = np.random.default_rng(0).uniform(size=(100, WIDTH)).astype("float32")
TARGETS = ROWS[:, :1] * 2 + 1


class Endpoint(layers.Layer):
    """Layer that reconstructs its input and adds the error as a loss."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x):
        made = self.dense(x)
        self.add_loss(ops.mean(ops.square(made - x)))
        return made


class Sampling(layers.Layer):
    """Layer that draws from normal distributions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs):
        mean, log_variance = inputs
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Autoencoder(keras.Model):
    """Variational autoencoder without ``call``; its layers are built by its training step."""

    def __init__(self, *, noise):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(WIDTH, "sigmoid")])
        self.sampling = Sampling() if noise else None
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [self.total]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        code = self.sampling([mean, log_variance]) if self.sampling else mean
        error = ops.mean(ops.sum(ops.square(self.decoder(code) - x), 1))
        divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        return error + ops.mean(ops.sum(divergence, 1))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=data)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        self.total.update_state(loss, sample_weight=ops.shape(data)[0])
        return {"total": self.total.result()}


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), **options)
    return model


def endpoint():
    inputs = keras.Input((WIDTH,))
    return compiled(keras.Model(inputs, Endpoint()(inputs)))


def weight_penalty():
    inputs = keras.Input((WIDTH,))
    return compiled(keras.Model(inputs, layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2")(inputs)))


def autoencoder():
    return compiled(Autoencoder(noise=False))


def variational():
    return compiled(Autoencoder(noise=True))


def normalization():
    normalize = layers.Normalization()
    normalize.adapt(ROWS)
    return compiled(keras.Sequential([keras.Input((WIDTH,)), normalize]), loss="mse", metrics=["mae"])


def frozen():
    """Model without trainable weights, whose batch normalization still counts."""
    statistics = layers.BatchNormalization(center=False, scale=False)
    model = keras.Sequential([keras.Input((WIDTH,)), statistics, layers.Dropout(0.2, seed=1), layers.Dense(1)])
    model.layers[-1].trainable = False
    return compiled(model, loss="mse", metrics=["mae"])


class Expects(layers.Layer):
    """Layer that raises an error for tensors of another kind."""

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind = kind

    def call(self, x):
        if type(x).__name__ != self.kind:
            raise TypeError(f"expected a {self.kind}, received a {type(x).__name__}")
        return x

    def compute_output_spec(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


def of_sparse_rows():
    inputs = keras.Input((WIDTH,), sparse=True)
    hidden = layers.Dense(4, "tanh")(Expects("SparseTensor")(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(hidden)), loss="mse")


class OfSentences(keras.Model):
    """Mean of the embedded words of sentences of different lengths."""

    def __init__(self):
        super().__init__()
        self.expects, self.embedding, self.out = Expects("RaggedTensor"), layers.Embedding(10, 4), layers.Dense(1)

    def call(self, x):
        return self.out(tf.reduce_mean(self.embedding(self.expects(x)), axis=1))


def of_sentences():
    return compiled(OfSentences(), loss="mse")


def sparse_rows():
    """Return rows of which a quarter is stored, shape ``(100, WIDTH)``, as a matrix of SciPy."""
    from scipy import sparse

    return sparse.csr_matrix(np.where(ROWS > 0.75, ROWS, 0))


def sentences():
    """Return 100 sentences of one to six words."""
    draw = np.random.default_rng(1)
    return tf.ragged.constant([draw.integers(0, 10, n).tolist() for n in draw.integers(1, 7, 100)], dtype="int32")
