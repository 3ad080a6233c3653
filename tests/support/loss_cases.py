"""Losses with denominators of their own, and a small model of sequences with each of them."""

from __future__ import annotations

import keras
import numpy as np

ROWS, LENGTH, WORDS, CLASSES = 46, 5, 20, 3

CASES = {
    "mean": {"reduction": "sum_over_batch_size"},
    "weighted": {"reduction": "sum_over_batch_size", "weighted": True},
    "masked": {"reduction": "mean", "masked": True},
    "masked and weighted": {"reduction": "sum_over_batch_size", "masked": True, "weighted": True},
    "sum": {"reduction": "sum"},
    "sum, with a regularizer": {"reduction": "sum", "masked": True, "weighted": True, "regularizer": "l2"},
    "mean by weights": {"reduction": "mean_with_sample_weight", "weighted": True},
    "mean by weights and mask": {"reduction": "mean_with_sample_weight", "weighted": True, "masked": True},
    "mean by no weights": {"reduction": "mean_with_sample_weight", "regularizer": "l2"},
    "without a class": {"reduction": "sum_over_batch_size", "ignored": 1},
}
"""Arguments of :func:`build` and :func:`batch`, by name."""


def data(*, weighted=False, **_):
    """Return x, y and the weights of each word, or None; some rows have no word at all."""
    draw = np.random.default_rng(1)
    x = draw.integers(1, WORDS, (ROWS, LENGTH))
    x[np.arange(LENGTH)[None] >= draw.integers(0, LENGTH + 1, ROWS)[:, None]] = 0
    weights = draw.uniform(0.1, 3, (ROWS, LENGTH)).astype("float32")
    return x.astype("int32"), (x % CLASSES).astype("int32"), weights if weighted else None


def build(*, reduction, masked=False, regularizer=None, ignored=None, rate=None, **_):
    """Return a compiled model with the same weights at each call."""
    keras.utils.set_random_seed(1)
    embedding = keras.layers.Embedding(WORDS, 4, mask_zero=masked)
    output = keras.layers.Dense(CLASSES, activation="softmax", kernel_regularizer=regularizer)
    model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), embedding, output])
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction, ignore_class=ignored)
    rate = rate or (0.005 if reduction == "sum" else 0.3)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss)
    return model


def flat(model):
    """Return the trainable variables as one vector."""
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(variable)) for variable in model.trainable_variables])
