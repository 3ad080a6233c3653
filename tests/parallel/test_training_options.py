"""Optimizers, options and models of every kind, trained by all ranks together."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hfdt.keras as hvd
from tests.support.rank_training import (
    CLASSES,
    EPOCHS,
    FEATURES,
    STEPS,
    assert_equal_on_all_ranks,
    compare,
    dense_model,
    embedding_model,
    on_all_ranks,
    on_one_process,
    words,
)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped by norm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.02),
    "clipped by global norm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.02),
    "clipped by value": lambda: keras.optimizers.SGD(0.1, clipvalue=0.005),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)),
    "moving average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "keras accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "dynamic loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_equals_one_process_with_the_global_batch(optimizer):
    compare(dense_model, OPTIMIZERS[optimizer])


def test_sparse_gradients_made_dense():
    compare(embedding_model, OPTIMIZERS["momentum"], words, sparse_as_dense=True)


def test_the_sum_is_the_average_times_the_ranks():
    def make(rate):
        return keras.optimizers.SGD(rate, momentum=0.9)

    summed = on_all_ranks(dense_model, hvd.DistributedOptimizer(make(0.1 / hvd.size()), op=hvd.Sum))
    np.testing.assert_allclose(summed, on_one_process(dense_model, make(0.1)), atol=1e-5)


def test_the_sum_of_sparse_gradients():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 / hvd.size()), op=hvd.Sum)
    alone = on_one_process(embedding_model, keras.optimizers.SGD(0.1), words)
    np.testing.assert_allclose(on_all_ranks(embedding_model, optimizer, words), alone, atol=1e-5)


@pytest.mark.parametrize(("compression", "tolerance"), [("none", 1e-5), ("fp16", 1e-3), ("bf16", 5e-3)])
def test_compressed_gradients_stay_close(compression, tolerance):
    compare(dense_model, OPTIMIZERS["momentum"], tolerance=tolerance, compression=compression)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression_does_compress(compression):
    exact = on_all_ranks(dense_model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    rounded = on_all_ranks(dense_model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression))
    assert np.abs(exact - rounded).max() > 0


def test_bf16_keeps_what_overflows_fp16():
    def trained(compression):
        variable = keras.Variable(np.zeros(3, "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
        optimizer.apply([tf.constant([1e6, 1.0, -3e7])], [variable])
        return -variable.numpy()

    np.testing.assert_allclose(trained("bf16"), [1e6, 1.0, -3e7], rtol=1e-2)
    assert not np.isfinite(trained("fp16")).all()


@pytest.mark.parametrize("groups", [1, 2, 99])
def test_any_number_of_groups(groups):
    compare(dense_model, OPTIMIZERS["momentum"], groups=groups)


def test_groups_of_named_variables():
    models = []

    def build():
        models.append(dense_model())
        return models[-1]

    model = build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=[model.trainable_variables[:2]])
    together = on_all_ranks(lambda: model, optimizer)
    assert_equal_on_all_ranks(together)


def test_variables_of_several_dtypes():
    variables = [keras.Variable([1.0], dtype=d) for d in ("float32", "float64", "float16", "bfloat16")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.fill([1], tf.cast(hvd.rank(), v.dtype)) for v in variables], variables)
    mean = (hvd.size() - 1) / 2
    assert [float(v.numpy()[0]) for v in variables] == [1.0 - mean] * 4


def test_predivided_gradients_are_still_an_average():
    compare(dense_model, OPTIMIZERS["momentum"], gradient_predivide_factor=2.0)


@pytest.mark.parametrize("model", [dense_model, embedding_model])
def test_several_passes_equal_one_batch_of_all_of_them(model):
    rows = {} if model is dense_model else {"rows": words}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=STEPS, average_aggregated_gradients=True)
    together = on_all_ranks(model, wrapped, **rows)
    assert_equal_on_all_ranks(together)
    assert int(optimizer.iterations) == STEPS * EPOCHS
    accumulating = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=STEPS)
    np.testing.assert_allclose(together, on_one_process(model, accumulating, **rows), atol=1e-5)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    variable = keras.Variable([1.0])
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaler)
    optimizer.build([variable])
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    step(tf.constant([np.inf if hvd.rank() == 1 else 4.0]))
    assert variable.numpy().tolist() == [1.0]
    assert float(scaler.dynamic_scale) == 2.0
    step(tf.constant([2.0]))
    assert variable.numpy().tolist() == [0.0]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(8, activation="tanh")
        self.last = keras.layers.Dense(CLASSES, activation="softmax")

    def call(self, inputs):
        return self.last(self.first(inputs))


class OwnStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("build", [Subclassed, OwnStep])
def test_models_that_are_built_by_fit(build):
    compare(build, OPTIMIZERS["adam"])


@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"steps_per_execution": 3}, {"jit_compile": True}], ids=lambda o: next(iter(o))
)
def test_every_way_keras_runs_a_step(options):
    together = on_all_ranks(dense_model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), **options)
    assert_equal_on_all_ranks(together)
    np.testing.assert_allclose(together, on_one_process(dense_model, keras.optimizers.Adam(0.01)), atol=1e-5)


def test_different_starts_are_made_equal():
    def build():
        keras.utils.set_random_seed(100 + hvd.rank())
        return dense_model()

    assert_equal_on_all_ranks(on_all_ranks(build, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))))


def test_ranks_drop_out_different_units():
    models = []

    def build():
        keras.utils.set_random_seed(100 + hvd.rank())
        layers = [keras.Input((FEATURES,)), keras.layers.Dropout(0.5), keras.layers.Dense(CLASSES, "softmax")]
        models.append(keras.Sequential(layers))
        return models[-1]

    assert_equal_on_all_ranks(on_all_ranks(build, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))))
    seeds = np.asarray(hvd.allgather(models[0].layers[0].seed_generator.state.numpy()[None]))
    assert len({tuple(seed) for seed in seeds.tolist()}) == hvd.size()
