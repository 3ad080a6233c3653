"""State that ``hfdt.keras.elastic`` keeps, restores and shares, on ranks that stay."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hfdt.keras as hvd
from nfdt.core.errors import UsageError
from tests.support.rank_training import dense_model

BATCHES = 4


def compiled() -> keras.Model:
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="sparse_categorical_crossentropy")
    return model


def scatter(model: keras.Model) -> None:
    """Give every rank weights and optimizer state of its own."""
    for variable in [*model.weights, *model.optimizer.variables]:
        if "float" in str(variable.dtype):
            variable.assign(np.full(variable.shape, 1.0 + hvd.rank()))


def values(model: keras.Model) -> list[float]:
    return [float(np.max(np.asarray(v))) for v in [*model.weights, *model.optimizer.variables]]


def test_a_state_goes_back_to_its_last_copy():
    model = compiled()
    state = hvd.elastic.KerasState(model, epoch=0)
    before = values(model)
    scatter(model)
    state.epoch = 5
    state.restore()
    assert values(model) == before
    assert state.epoch == 0
    scatter(model)
    state.epoch = 5
    state.commit()
    state.epoch = 6
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    state.restore()
    assert np.max(model.get_weights()[0]) == 1.0 + hvd.rank()
    assert state.epoch == 5


def test_a_state_is_brought_to_that_of_rank_0():
    model = compiled()
    state = hvd.elastic.KerasState(model, epoch=hvd.rank())
    scatter(model)
    state.sync()
    assert {v for v in values(model) if v >= 1} == {1.0}
    assert state.epoch == 0


def test_what_is_run_is_called_once_and_returns_its_value():
    model = compiled()
    state = hvd.elastic.KerasState(model, epoch=0)
    called = []

    @hvd.elastic.run
    def train(state, what):
        called.append(what)
        return hvd.size()

    assert train(state, "this") == hvd.size()
    assert called == ["this"]


def test_callbacks_count_batches_and_epochs_and_commit():
    model = compiled()
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    seen, commits = [], []
    commit = state.commit
    state.commit = lambda: (commits.append(state.batch), commit())
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(state.batch)),
    ]
    x = np.zeros((BATCHES * 2, model.input_shape[1]), np.float32)
    y = np.zeros(BATCHES * 2, np.int64)
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    assert seen == [0, 1, 2, 3] * 2
    assert commits == [2, 0, 1, 0]  # every third batch and each epoch's end
    assert (state.epoch, state.batch) == (2, 0)


def test_a_model_that_is_not_built_has_no_state():
    with pytest.raises(UsageError, match="built model"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
