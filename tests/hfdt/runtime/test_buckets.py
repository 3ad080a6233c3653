"""Buckets of an allreduce step: one process that is its own ring, with a reduction that records what it was given."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hfdt.runtime import step as steps
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state

BATCH = (np.random.default_rng(0).normal(size=(16, 6)).astype("float32"), np.arange(16) % 3)


class OneRank:
    """The communicator of one rank."""

    @staticmethod
    def gather(data):
        return [data]


def model():
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(8, "tanh")
    made = keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3, "softmax")])
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), "sparse_categorical_crossentropy")
    return made


def step_of(own, reduce, program=None):
    packed = pack(program or own, BATCH)
    manifest = packed.manifest
    return steps.AllreduceStep(
        own, manifest, load_state(packed.artifacts[manifest.state]), reduce, steps.DenominatorInGraph(OneRank())
    )


@pytest.mark.parametrize(
    ("least", "expected"), [(1, [[3], [2], [1], [0]]), (11, [[2, 3], [0, 1]]), (10**6, [[0, 1, 2, 3]])]
)
def test_the_last_variables_are_in_the_first_bucket(monkeypatch, least, expected):
    monkeypatch.setattr(steps, "BUCKET", least)
    layout = ParameterLayout.of([("a", (6, 8)), ("b", (8,)), ("c", (8, 3)), ("d", (3,))])
    assert steps.buckets(layout) == expected


def test_a_model_without_variables_has_one_empty_bucket():
    assert steps.buckets(ParameterLayout.of([])) == [[]]


@pytest.mark.parametrize("least", [1, 11, 10**6])
@pytest.mark.parametrize("paused", [False, True])
def test_training_in_buckets_equals_keras(monkeypatch, least, paused):
    monkeypatch.setattr(steps, "BUCKET", least)
    names = set()

    def reduce(gradient, name):
        names.add(name)
        return gradient

    own, alone = model(), model()
    step = step_of(own, reduce)
    for _ in range(3):
        step(BATCH, 1.0, (lambda seconds: None) if paused else None)
        alone.train_on_batch(*BATCH)
    count = len(steps.buckets(step.layout))
    assert names == ({steps.GRADIENT} if count == 1 else {f"{steps.GRADIENT}.{n}" for n in range(count)})
    for found, wanted in zip(own.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_rank_without_rows_reduces_the_same_buckets(monkeypatch):
    monkeypatch.setattr(steps, "BUCKET", 11)
    sizes = {}

    def reduce(gradient, name):
        sizes[name] = int(gradient.shape[0])
        return gradient

    step_of(model(), reduce)(None, 0.0)
    assert sizes == {f"{steps.GRADIENT}.0": 27, f"{steps.GRADIENT}.1": 56}


def test_a_bucket_is_reduced_while_earlier_gradients_are_computed(monkeypatch, tmp_path):
    """The gradient of the first layer waits, in TensorFlow's graph, until the last layer's has been reduced."""
    monkeypatch.setattr(steps, "BUCKET", 11)
    reduced = tmp_path / "reduced"

    def looks_again(looked, found):
        return tf.logical_and(looked < 3 * 10**5, tf.logical_not(found))

    def look(looked, found):
        star = tf.strings.substr("*", 0, tf.minimum(looked + 1, 1))  # a constant name would be looked up only once
        return looked + 1, tf.size(tf.io.matching_files(tf.strings.join([str(reduced), star]))) > 0

    @tf.custom_gradient
    def late(x):
        def backward(gradient):
            _, found = tf.while_loop(looks_again, look, (0, False))
            return tf.where(found, gradient, np.nan)

        return tf.identity(x), backward

    class Late(keras.layers.Layer):
        def call(self, inputs):
            return late(inputs)

    def reduce(gradient, name):
        def note(vector):
            reduced.touch()
            return vector

        return tf.ensure_shape(tf.py_function(note, [gradient], tf.float32), gradient.shape)

    keras.utils.set_random_seed(1)
    own = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), Late(), keras.layers.Dense(3, "softmax")])
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    own.compile(momentum, "sparse_categorical_crossentropy", jit_compile=False)
    step = step_of(own, reduce, program=model())
    step.shared.agree(None, has_rows=True)  # done in the first step, which is not overlapped
    step(BATCH, 1.0)
    assert all(np.isfinite(weights).all() for weights in own.get_weights())
