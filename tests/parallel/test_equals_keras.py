"""Equality of training on all ranks and on one process with the global batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hfdt.keras as hvd
from tests.support.rank_training import (
    CLASSES,
    FEATURES,
    assert_equal_on_all_ranks,
    compare,
    dense_model,
    embedding_model,
    on_all_ranks,
    on_one_process,
    words,
)

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dense_gradients(optimizer):
    compare(dense_model, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients_of_an_embedding(optimizer):
    compare(embedding_model, OPTIMIZERS[optimizer], words)


@pytest.mark.parametrize("inside", [True, False], ids=["scaler inside", "scaler put around by compile"])
def test_mixed_float16(inside):
    models = []

    def build():
        models.append(dense_model("mixed_float16"))
        return models[-1]

    def make():
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(sgd) if inside else sgd

    compare(build, make, tolerance=5e-3)
    assert all(isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) for model in models)
    assert [float(model.optimizer.dynamic_scale) for model in models] == [2.0**15] * 2


def test_mixed_bfloat16():
    compare(lambda: dense_model("mixed_bfloat16"), OPTIMIZERS["momentum"], tolerance=3e-2)


def test_batch_normalization_uses_each_rank_s_batch_and_ends_with_equal_statistics():
    models = []

    def build():
        normalise = keras.layers.BatchNormalization(momentum=0.8)
        models.append(keras.Sequential([keras.Input((FEATURES,)), normalise, keras.layers.Dense(CLASSES, "softmax")]))
        return models[-1]

    together = on_all_ranks(build, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
    assert_equal_on_all_ranks(together)
    alone = on_one_process(build, keras.optimizers.SGD(0.1, momentum=0.9))
    ours, keras_own = (model.layers[0] for model in models)
    # The mean of the ranks' means is the mean of the global batch; the variances lack the spread between the ranks.
    np.testing.assert_allclose(ours.moving_mean.numpy(), keras_own.moving_mean.numpy(), atol=1e-5)
    np.testing.assert_allclose(ours.moving_variance.numpy(), keras_own.moving_variance.numpy(), atol=0.3)
    np.testing.assert_allclose(together, alone, atol=0.3)
