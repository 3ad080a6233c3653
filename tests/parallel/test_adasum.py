"""Adasum: equal gradients are averaged, orthogonal ones are added."""

from __future__ import annotations

from functools import reduce

import keras
import numpy as np
import pytest
import tensorflow as tf

import hfdt.keras as hvd
from nfdt.core.errors import UsageError


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the Adasum of Maleki et al. 2020, arXiv:2006.02924."""
    dot = a @ b
    return (1 - dot / (2 * a @ a)) * a + (1 - dot / (2 * b @ b)) * b


def update(gradient: np.ndarray, **options) -> np.ndarray:
    variable = keras.Variable(np.zeros_like(gradient))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum, **options)
    optimizer.build([variable])
    tf.function(lambda g: optimizer.apply([g], [variable]))(tf.constant(gradient))
    return -variable.numpy()


@pytest.fixture
def _mpi():
    if not hvd.mpi_enabled():
        pytest.skip("Adasum needs MPI")


@pytest.mark.usefixtures("_mpi")
def test_equal_gradients_are_averaged():
    np.testing.assert_allclose(update(np.asarray([1.0, 2.0], "float32")), [1.0, 2.0], rtol=1e-6)


@pytest.mark.usefixtures("_mpi")
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-5), ("fp16", 5e-3)])
def test_any_gradients_follow_the_formula(compression, tolerance):
    gradients = np.random.default_rng(0).normal(size=(hvd.size(), 8)).astype("float32")
    pairs = list(gradients)
    while len(pairs) > 1:
        pairs = [adasum(a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    updated = update(gradients[hvd.rank()], compression=compression)
    np.testing.assert_allclose(updated, pairs[0], atol=tolerance)
    assert reduce(np.maximum, np.asarray(hvd.allgather(updated[None]))).tolist() == updated.tolist()


@pytest.mark.usefixtures("_mpi")
def test_sparse_gradients_become_dense():
    variable = keras.Variable(np.zeros((3, 1), "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    slices = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([hvd.rank() % 2]), dense_shape=tf.constant([3, 1]))
    optimizer.apply([slices], [variable])
    np.testing.assert_allclose(variable.numpy(), [[-2.0], [-2.0], [0.0]], atol=1e-6)


def test_what_adasum_cannot_do_is_refused():
    options = {"compression": "bf16"} if hvd.mpi_enabled() else {}
    with pytest.raises(UsageError, match="Adasum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum, **options)
