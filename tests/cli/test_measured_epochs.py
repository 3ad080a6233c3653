"""Epochs of plain Keras and of one real worker: how long they are, and when the measurement ends."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.cli.profiling import LEAST_STEPS, MOST_BYTES, MOST_EPOCHS, RepeatedBatch, plain_epochs
from nfdt.core.arrays.composite import SparseArray
from nfdt.model.training.plain_training import EpochTimer
from tests.support.clocks import ManualClock

BATCH = (np.ones((4, 3), "float32"), np.zeros((4, 1), "float32"), None)


@pytest.mark.parametrize(
    ("steps", "step_s", "expected"),
    [(50, 1e-4, 50), (5000, 0.01, 100), (5000, 10.0, LEAST_STEPS), (2, 10.0, 2)],
)
def test_an_epoch_is_the_scripts_or_about_a_second(steps, step_s, expected):
    found = RepeatedBatch.of(BATCH, steps, step_s)
    assert found is not None
    assert found.steps == expected
    arguments = found.arguments(EpochTimer(ManualClock(), 1.0))
    assert arguments["x"].shape == (4 * expected, 3)
    assert arguments["batch_size"] == 4
    assert arguments["sample_weight"] is None


def test_large_batches_are_repeated_as_often_as_memory_allows():
    large = np.broadcast_to(np.float32(1), (MOST_BYTES // 16, 1))
    found = RepeatedBatch.of((large,), 1000, 0.01)
    assert found is not None
    assert found.steps == 4


def test_batches_that_are_no_dense_arrays_are_not_repeated():
    sparse = SparseArray(np.zeros((1, 2), np.int64), np.ones(1, np.float32), (4, 3))
    assert RepeatedBatch.of((sparse, np.zeros((4, 1))), 10, 0.01) is None


@pytest.mark.parametrize(("epoch_s", "counted"), [(0.01, MOST_EPOCHS), (0.3, 3), (20.0, 1)])
def test_the_first_epoch_does_not_count_and_the_budget_ends_the_others(epoch_s, counted):
    clock = ManualClock()

    class Takes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock.advance(epoch_s / 5)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def fit(model, callbacks, **arguments):
        return keras.Model.fit(model, callbacks=[*callbacks, Takes()][::-1], **arguments)

    found = plain_epochs(fit, model, RepeatedBatch(BATCH, 5), clock, budget_s=1.0)
    assert found.steps == 5
    assert found.seconds == pytest.approx([epoch_s] * counted)
