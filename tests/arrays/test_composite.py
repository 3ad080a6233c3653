"""Sparse and ragged arrays on the host: the reference for their rows is TensorFlow."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.errors import ProtocolError
from nfdt.model.backends.contract import to_tensor
from nfdt.model.backends.direct_call import components_of
from nfdt.model.program.building import blank_batch, describe_batch
from nfdt.model.training.data import decode_batch, encode_batch
from nfdt.model.training.host_batches import as_batch, rows_of

DENSE = np.arange(24, dtype="f4").reshape(6, 4) % 5
WORDS = tf.ragged.constant([[1, 2], [], [3], [4, 5, 6], [], [7]])
PARAGRAPHS = tf.RaggedTensor.from_row_splits(WORDS, [0, 0, 2, 5, 6])
VECTORS = WORDS.with_flat_values(tf.reshape(tf.range(14.0), (7, 2)))
ROWS = [slice(0, 2), slice(1, 4), slice(3, 3), slice(2, 6), slice(0, 9)]


def same(array, tensor):
    assert array.ndim == len(array.shape) == tensor.shape.rank
    for part, wanted in zip(components_of(to_tensor(array)), components_of(tensor), strict=True):
        assert part.dtype == wanted.dtype
        np.testing.assert_array_equal(part, wanted)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_a_sparse_array_are_those_of_the_dense_one(rows):
    same(as_batch(tf.sparse.from_dense(DENSE))[rows], tf.sparse.from_dense(DENSE[rows]))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tensor", [WORDS, PARAGRAPHS, VECTORS], ids=["words", "paragraphs", "vectors"])
def test_rows_of_a_ragged_array_are_those_of_tensorflow(tensor, rows):
    same(as_batch(tensor)[rows], tensor[rows])


BATCHES = {
    "sparse": (tf.sparse.from_dense(DENSE), DENSE),
    "ragged": {"x": WORDS, "y": DENSE},
    "twice ragged": (PARAGRAPHS, None),
    "texts": tf.ragged.constant([["a"], ["b", "cd"]]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_comes_back_from_its_message(batch):
    got = decode_batch(encode_batch(as_batch(batch)))
    assert rows_of(got) == keras.tree.flatten(batch)[0].shape[0]
    for array, tensor in zip(keras.tree.flatten(got), keras.tree.flatten(batch), strict=True):
        if isinstance(array, SparseArray | RaggedArray):
            same(array, tensor)
        else:
            assert array is None or np.array_equal(array, tensor)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_described_batch_has_the_same_rows_without_elements(batch):
    blank = blank_batch(describe_batch(as_batch(batch)))
    for array, tensor in zip(keras.tree.flatten(blank), keras.tree.flatten(batch), strict=True):
        if array is not None:
            assert to_tensor(array).shape.as_list() == list(tensor.shape)
            assert to_tensor(array).dtype == tensor.dtype
            assert not (array.values if isinstance(array, SparseArray | RaggedArray) else array).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: SparseArray(np.zeros((2, 2), "i8"), np.zeros(3), (4, 4)),
        lambda: SparseArray(np.zeros((2, 1), "i8"), np.zeros(2), (4, 4)),
        lambda: SparseArray(np.zeros((2, 0), "i8"), np.zeros(2), ()),
        lambda: RaggedArray(np.zeros(3), ()),
        lambda: RaggedArray(np.zeros(3), (np.zeros(0, "i8"),)),
        lambda: RaggedArray(np.zeros(()), (np.zeros(1, "i8"),)),
    ],
)
def test_parts_that_do_not_fit_are_refused(make):
    with pytest.raises(ProtocolError):
        make()
