"""Direct calls of a traced function: the same results as with ordinary calls."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.model.backends.contract import to_tensor
from nfdt.model.backends.direct_call import DirectCall, leaves_of
from nfdt.shard.tensors import Compiled

WEIGHTS = np.arange(3, dtype=np.float32)


def total(weights, batch, factor):
    leaves = [tf.reduce_sum(tf.cast(dense(leaf), tf.float32)) for leaf in leaves_of(batch)]
    weighed = [place * leaf for place, leaf in enumerate(leaves, 1)]
    return (tf.reduce_sum(weights) + tf.add_n(weighed)) * tf.cast(factor, tf.float32)


def rows(count, dtype=np.float32):
    return np.ones((count, 2), dtype)


def sparse(count, stored):
    return SparseArray(np.arange(2 * stored).reshape(stored, 2) % count, np.arange(1, stored + 1.0), (count, 9))


def ragged(*lengths):
    return RaggedArray(np.arange(1.0, sum(lengths) + 1), (np.cumsum([0, *lengths]),))


def dense(leaf):
    tensor = to_tensor(leaf) if isinstance(leaf, SparseArray | RaggedArray) else leaf
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.to_dense(tensor, validate_indices=False)
    return tensor.to_tensor() if isinstance(tensor, tf.RaggedTensor) else tensor


def graph(function):
    return tf.function(function, reduce_retracing=True)


@pytest.mark.parametrize("wrap", [None, graph])
@pytest.mark.parametrize(
    "batches",
    [
        [rows(4), rows(4), rows(3), rows(4), rows(5)],
        [(rows(4), rows(4)), [rows(4), rows(4)], {"x": rows(4), "y": rows(4)}, {"y": rows(4), "z": rows(4)}],
        [(rows(4), None), (rows(4), rows(4)), (rows(4), None)],
        [rows(4), rows(4, np.int64), rows(4, np.float64)],
        [rows(4), tf.ones((4, 2)), [[1.0, 2.0], [3.0]], rows(4)],
        [{"b": rows(4), "a": 2 * rows(3)}, {"a": rows(3), "b": rows(4)}],
        [(sparse(4, 1), rows(4)), (sparse(4, 2), rows(4)), (rows(4), sparse(4, 2)), (sparse(3, 2), rows(3))],
        [{"x": ragged(1, 2)}, {"x": ragged(3, 0)}, {"x": ragged(1, 2, 3)}, {"x": rows(4)}],
    ],
    ids=["shapes", "structures", "none", "types", "tensors", "order", "sparse", "ragged"],
)
def test_every_batch_finds_its_own_graph(wrap, batches):
    call = DirectCall(total, wrap)
    for factor, batch in enumerate(batches * 2):
        wanted = total(WEIGHTS, batch, factor)
        assert float(call(WEIGHTS, call.prepare(batch), tf.constant(factor, tf.int64))) == float(wanted)


def test_a_graph_is_traced_once_for_its_shapes():
    call = DirectCall(total, graph)
    for _ in range(3):
        call(WEIGHTS, call.prepare(rows(4)), tf.constant(1, tf.int64))
    assert call.traces == 1
    for count in (3, 5, 7, 4, 3):
        call(WEIGHTS, call.prepare(rows(count)), tf.constant(1, tf.int64))
    assert call.traces == 2


def test_the_number_of_stored_elements_does_not_matter_for_a_graph():
    call = DirectCall(total, graph)
    for batch in (sparse(4, 1), sparse(4, 3), sparse(4, 2)):
        call(WEIGHTS, call.prepare(batch), tf.constant(1, tf.int64))
    assert call.traces == 1


def test_many_jobs_of_one_process_cause_no_warning_of_retracing(caplog):
    tf.get_logger().addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, tf.get_logger().name):
            for _ in range(8):
                call = DirectCall(total, graph)
                call(WEIGHTS, call.prepare(rows(4)), tf.constant(1, tf.int64))
                Compiled(lambda pair: pair[0] + pair[1])((tf.ones(2), tf.ones(2)))
    finally:
        tf.get_logger().removeHandler(caplog.handler)
    assert caplog.text == ""
