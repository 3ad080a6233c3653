"""Steps with tables: the gradient equals the flat step's, on the given rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import ChangedRows, Rows, RowWeights, TableLayout
from nfdt.model.backends.tables import TableVariable
from nfdt.model.backends.tensorflow_step import GradientStep

WORDS, WIDTH = 50, 8
MODES = {"graph": {"jit_compile": False}, "xla": {"jit_compile": True}, "eager": {"run_eagerly": True}}


def values(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def model(base=keras.Sequential, **options):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(WORDS, WIDTH), keras.layers.Flatten(), keras.layers.Dense(2)]
    made = base([keras.Input((3,), dtype="int32"), *layers])
    made.compile("sgd", "mse", **options)
    return made


def batch(seed):
    return np.random.default_rng(seed).integers(0, 20, (6, 3)).astype("int32"), values((6, 2), seed)


def steps(base=keras.Sequential, **options):
    """Return the steps of one model twice: flat, and with its table by rows."""
    flat, rows = model(base, **options), model(base, **options)
    layout = ParameterLayout.of([(v.path, v.shape) for v in flat.trainable_variables])
    return GradientStep(flat, layout), GradientStep(rows, layout, tables=(0,)), TableLayout.of(layout, (0,)), rows


def whole(split, gradient):
    table = np.zeros((WORDS, WIDTH), np.float32)
    table[gradient.rows[0].index] = gradient.rows[0].values
    return split.join(gradient.dense, [table])


class Decorated(keras.Sequential):
    """Model whose gradients leave an inner graph."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("mode", MODES)
def test_rows_hold_the_gradient_of_the_flat_step(mode):
    flat, rows, split, changed = steps(**MODES[mode])
    weights = values(split.size)
    for turn in range(4):
        news = [ChangedRows(0, 0, split.views(weights)[0])]
        if turn:
            index = np.array([1, 5, 30], np.int32)
            split.views(weights)[0][index] = values((3, WIDTH), turn)
            split.views(weights)[0][40:44] = turn
            news = [
                ChangedRows(0, 0, Rows(index, values((3, WIDTH), turn))),
                ChangedRows(0, 40, np.full((4, WIDTH), turn, "f4")),
            ]
        wanted = np.asarray(flat(weights, flat.prepare(batch(turn))).gradient)
        held = weights if turn == 3 else RowWeights(split.dense(weights), news)
        found = rows(held, rows.prepare(batch(turn))).gradient
        np.testing.assert_allclose(whole(split, found), wanted, rtol=1e-5, atol=1e-6)
        assert 0 < found.rows[0].index.size < 20
        np.testing.assert_array_equal(changed.trainable_variables[0], split.views(weights)[0])


def test_gradients_of_an_inner_graph_come_as_rows_too():
    flat, rows, split, _ = steps(Decorated, jit_compile=False)
    weights = values(split.size)
    for turn in range(2):
        wanted = np.asarray(flat(weights, flat.prepare(batch(turn))).gradient)
        found = rows(weights, rows.prepare(batch(turn))).gradient
        np.testing.assert_allclose(whole(split, found), wanted, rtol=1e-5, atol=1e-6)


class AllRows(keras.Sequential):
    """Model that uses its whole table as well."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            table = self.trainable_variables[0]
            loss = self.compute_loss(x=x, y=y, y_pred=self(x)) + keras.ops.mean(table[:30] ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_dense_gradient_of_a_table_comes_as_its_nonzero_rows():
    flat, rows, split, _ = steps(AllRows, jit_compile=False)
    weights = values(split.size)
    wanted = np.asarray(flat(weights, flat.prepare(batch(1))).gradient)
    found = rows(weights, rows.prepare(batch(1))).gradient
    np.testing.assert_allclose(whole(split, found), wanted, rtol=1e-5, atol=1e-6)
    assert found.rows[0].index.tolist() == list(range(30))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_replaced_in_a_variable_that_others_assign_to(dtype):
    held = values((WORDS, WIDTH)).astype(dtype)
    variable = tf.Variable(tf.zeros((WORDS, WIDTH), dtype))
    table = TableVariable(variable)
    read = tf.function(lambda: tf.gather(tf.convert_to_tensor(variable), tf.range(WORDS)))
    table.replace(held.astype("f4"))
    for turn in range(4):
        if turn == 2:
            held = values((WORDS, WIDTH), 9).astype(dtype)
            variable.assign(held)
        index = np.array([turn, 10, 49], np.int32)
        new = values((3, WIDTH), turn)
        table.update(0, Rows(index, new))
        held[index] = new.astype(dtype)
        np.testing.assert_array_equal(read(), held)


def test_a_variable_whose_reads_are_copies_is_updated_as_well():
    variable = tf.Variable(values((WORDS, WIDTH)))
    table = TableVariable(variable)
    variable.scatter_update(tf.IndexedSlices(tf.ones((1, WIDTH)), tf.constant([3])))
    held = variable.numpy()
    for turn in range(3):
        table.update(2, Rows(np.array([1, 4], np.int32), np.full((2, WIDTH), turn, "f4")))
        held[[3, 6]] = turn
        np.testing.assert_array_equal(variable, held)
