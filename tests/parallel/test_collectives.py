"""Collective operations on values of all ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hfdt.keras as hvd
from nfdt.core.errors import UsageError
from tests.support.rank_training import dense_model


def test_a_rank_knows_its_place():
    assert hvd.is_initialized()
    assert sorted(np.asarray(hvd.allgather([hvd.rank()])).tolist()) == list(range(hvd.size()))
    assert 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


@pytest.mark.parametrize("value", [2.0, [1.0, 2.0], np.ones((2, 3), "float32"), np.arange(4)], ids=str)
def test_allreduce_averages_by_default(value):
    np.testing.assert_allclose(hvd.allreduce(np.asarray(value) * 1.0), value)


def test_allreduce_sums_scales_and_compresses():
    one = tf.constant([float(hvd.rank())])
    total = sum(range(hvd.size()))
    assert float(hvd.allreduce(one, op=hvd.Sum)[0]) == total
    assert float(hvd.allreduce(one, average=False)[0]) == total
    assert float(hvd.allreduce(one, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)[0]) == 6 * total
    assert float(hvd.allreduce(one, op=hvd.Sum, compression=hvd.Compression.fp16)[0]) == total
    assert float(hvd.allreduce(one, op=hvd.Max)[0]) == hvd.size() - 1


def test_allreduce_takes_a_keras_variable():
    np.testing.assert_allclose(hvd.allreduce(keras.Variable([1.0, 2.0])), [1.0, 2.0])


def test_allreduce_in_a_graph():
    reduced = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="in_a_graph"))(tf.constant(1.0))
    assert float(reduced) == hvd.size()


def test_allreduce_refuses_two_spellings_and_bf16():
    with pytest.raises(UsageError, match="leave average out"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    with pytest.raises(UsageError, match="bf16"):
        hvd.allreduce(1.0, compression="bf16")


def test_allgather_takes_any_number_of_rows():
    rows = np.full((hvd.rank() + 1, 2), hvd.rank())
    expected = [[r, r] for r in range(hvd.size()) for _ in range(r + 1)]
    assert np.asarray(hvd.allgather(rows)).tolist() == expected


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int32", "uint32", "uint64", "uint8", "bool"]
)
def test_broadcast_takes_the_root_s_value_in_any_dtype(dtype):
    received = hvd.broadcast(tf.cast([hvd.rank(), 1], dtype), root_rank=1)
    assert received.dtype == dtype
    assert tf.cast(received, tf.int32).numpy().tolist() == [1, 1]


def test_reducescatter_gives_each_rank_its_rows():
    rows = np.arange(2 * hvd.size(), dtype="float32")
    np.testing.assert_allclose(hvd.reducescatter(rows), rows[2 * hvd.rank() : 2 * hvd.rank() + 2])


def test_broadcast_variables_of_any_dtype():
    variables = [keras.Variable([hvd.rank()], dtype=d) for d in ("float32", "bfloat16", "uint32", "int64")]
    variables.append(tf.Variable([hvd.rank()]))
    hvd.broadcast_variables(variables, root_rank=1)
    assert [int(keras.ops.convert_to_numpy(v)[0]) for v in variables] == [1] * 5


def test_broadcasting_nothing_is_allowed():
    hvd.broadcast_variables([], root_rank=0)


def test_different_variables_are_an_error_on_all_ranks_and_no_hang():
    variables = [keras.Variable([0.0])] * (1 + hvd.rank() % 2)
    with pytest.raises(UsageError, match="The ranks hold different variables"):
        hvd.broadcast_variables(variables, root_rank=0)


def test_global_variables_are_those_of_the_model_and_its_optimizer():
    keras.utils.set_random_seed(hvd.rank())
    model = dense_model()
    model.compile(keras.optimizers.SGD(0.1 * (hvd.rank() + 1), momentum=0.9), loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.momentums[0].assign(model.optimizer.momentums[0] + hvd.rank())
    hvd.broadcast_global_variables(0, model)
    state = np.concatenate([np.ravel(v.numpy()) for v in [*model.weights, *model.optimizer.variables]])
    np.testing.assert_array_equal(np.asarray(hvd.allgather(state[None])), [state] * hvd.size())
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)


def test_global_variables_without_a_model_are_refused():
    with pytest.raises(UsageError, match="broadcast_global_variables\\(root_rank, model\\)"):
        hvd.broadcast_global_variables(0)


def test_what_horovod_offers_in_addition_is_handed_on():
    assert hvd.gloo_built()
    assert hvd.global_process_set.size() == hvd.size()
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1, name="object") == {"rank": 1}
