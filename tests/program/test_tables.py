"""Which variables of a model are tables: those of which a traced step has the gradient of single rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from nfdt.model.program import tables
from nfdt.model.program.pack import pack

WORDS, WIDTH = 4096, 32
X = np.random.default_rng(0).integers(0, WORDS, (8, 4)).astype("int32")
Y = np.ones((8, 1), "float32")
SGD = keras.optimizers.SGD


class Doubled(layers.Embedding):
    """Subclass that looks rows up."""

    def call(self, inputs):
        return 2 * super().call(inputs)


class Normed(layers.Embedding):
    """Subclass whose result depends on all rows."""

    def call(self, inputs):
        return ops.take(self.embeddings / ops.norm(self.embeddings), inputs, axis=0)


class OneHot(layers.Embedding):
    """Subclass that multiplies with its whole table."""

    def call(self, inputs):
        return ops.matmul(ops.one_hot(inputs, self.input_dim), self.embeddings)


class Table(layers.Layer):
    """Layer of the script that looks rows up."""

    def build(self, shape):
        self.table = self.add_weight(shape=(WORDS, WIDTH))

    def call(self, inputs):
        return ops.take(self.table, inputs, axis=0)


class Features(layers.Layer):
    """Layer whose embeddings are in a dictionary, two of them the same, as in KerasRS's DistributedEmbedding."""

    def __init__(self):
        super().__init__()
        shared = Doubled(WORDS, WIDTH)
        self.tables = {"a": shared, "b": Doubled(WORDS, WIDTH), "c": shared}

    def call(self, inputs):
        return ops.concatenate([table(inputs) for table in self.tables.values()], axis=1)


def sequence(layer):
    return keras.Sequential([keras.Input((4,), dtype="int32"), layer, layers.Flatten(), layers.Dense(1)])


class Reversible(keras.Model):
    """Language model whose output layer uses the table of its input, or has one of its own."""

    def __init__(self, tied):
        super().__init__()
        self.table = layers.ReversibleEmbedding(WORDS, WIDTH, tie_weights=tied)

    def call(self, inputs):
        return ops.mean(self.table(self.table(inputs), reverse=True), axis=(1, 2))[:, None]


class TwoUses(keras.Model):
    """Model that looks rows up and multiplies with the whole table."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS, WIDTH)

    def call(self, inputs):
        return ops.mean(ops.matmul(self.table(inputs), ops.transpose(self.table.embeddings)), axis=(1, 2))[:, None]


class OwnStep(keras.Sequential):
    """Model with a ``train_step`` of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


TABLES = {
    "Keras' own": (lambda: sequence(layers.Embedding(WORDS, WIDTH)), 1),
    "subclass": (lambda: sequence(Doubled(WORDS, WIDTH)), 1),
    "layer of the script": (lambda: sequence(Table()), 1),
    "several in a dictionary": (lambda: sequence(Features()), 2),
    "half precision": (lambda: sequence(Doubled(WORDS, WIDTH, dtype="mixed_float16")), 1),
    "own train_step": (lambda: OwnStep([layers.Embedding(WORDS, WIDTH), layers.Flatten(), layers.Dense(1)]), 1),
    "output layer of its own": (lambda: Reversible(False), 1),
    "subclass that norms": (lambda: sequence(Normed(WORDS, WIDTH)), 0),
    "subclass that multiplies": (lambda: sequence(OneHot(WORDS, WIDTH)), 0),
    "tied output layer": (lambda: Reversible(True), 0),
    "second use": (TwoUses, 0),
    "regularizer": (lambda: sequence(layers.Embedding(WORDS, WIDTH, embeddings_regularizer="l2")), 0),
}


def tables_of(make, optimizer=SGD, sparse=True, **options):
    model = make()
    model.compile(optimizer(0.1), "mse", **options)
    manifest = pack(model, (X, Y), sparse=sparse).manifest
    return [manifest.layout.slots[index].shape for index in manifest.tables]


@pytest.mark.processes
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_with_gradients_of_single_rows(name):
    make, count = TABLES[name]
    assert tables_of(make) == [(WORDS, WIDTH)] * count


def test_an_eager_model_has_the_same_tables_and_keeps_its_state():
    model = sequence(Doubled(WORDS, WIDTH))
    model.compile(SGD(0.1), "mse", run_eagerly=True)
    before = model.get_weights()
    assert pack(model, (X, Y), sparse=True).manifest.tables == [0]
    assert int(model.optimizer.iterations) == 0
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))


@pytest.mark.parametrize(
    ("optimizer", "sparse", "count"),
    [
        (keras.optimizers.Adagrad, True, 1),
        (keras.optimizers.Adagrad, False, 0),
        (keras.optimizers.Adam, True, 0),
        (keras.optimizers.Adam, "lazy", 1),
        (keras.optimizers.RMSprop, "lazy", 0),
    ],
)
def test_only_programs_that_may_send_rows_are_traced(optimizer, sparse, count, monkeypatch):
    traced, trace = [], tables.trace_step
    monkeypatch.setattr(tables, "trace_step", lambda *args: traced.append(1) or trace(*args))
    assert len(tables_of(lambda: sequence(Doubled(WORDS, WIDTH)), optimizer, sparse)) == count
    assert len(traced) == count


def test_models_without_a_large_table_are_not_traced(monkeypatch):
    monkeypatch.setattr(tables, "trace_step", lambda *args: pytest.fail("traced"))
    assert tables_of(lambda: sequence(layers.Embedding(WORDS, 4))) == [(WORDS, 4)]
    dense = [layers.Dense(300), layers.Dense(300), layers.Dense(1)]
    assert tables_of(lambda: keras.Sequential([keras.Input((4,)), *dense])) == []
