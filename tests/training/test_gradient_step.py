"""Equality of Keras' own step and a worker's gradient applied by the user's optimizer."""

import gc
import tracemalloc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from nfdt.core.errors import CaptureError
from nfdt.model.backends import tensorflow_step
from nfdt.model.backends.tensorflow_step import GradientStep
from nfdt.model.program.pack import layout_of
from nfdt.model.training.steps import evaluation_step


def network(policy="float32"):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            layers.Dense(6, "relu", kernel_regularizer="l2", dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.Dropout(0.3, dtype=policy),
            layers.Dense(1, dtype=policy),
        ],
    )


def follow(worker, batches):
    """Train with the worker's gradients; returns the last logs."""
    for x, y in batches:
        result = worker.step(np.asarray(worker.weights), (x, y))
        assert result.finite
        worker.optimizer.apply([result.gradient], [worker.weights])
    return {name: float(value) for name, value in result.logs.items()}


def fit(model, batches):
    """Train with Keras on the same batches; returns the epoch's logs."""

    def generate():
        yield from batches

    signature = tuple(tf.TensorSpec([None, n], tf.float32) for n in (4, 1))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return {name: values[-1] for name, values in model.fit(dataset, verbose=0).history.items()}


OPTIMIZERS = [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    lambda: keras.optimizers.Adam(0.05),
    lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    lambda: keras.optimizers.SGD(0.1, loss_scale_factor=64.0),
]
SUM = keras.losses.MeanSquaredError(reduction="sum")


def with_dynamic_scale():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1024.0)


@pytest.mark.feature("`run_eagerly` and `jit_compile`", area="Models")
@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        *((make, {}) for make in OPTIMIZERS),
        (OPTIMIZERS[0], {"run_eagerly": True}),
        (OPTIMIZERS[1], {"jit_compile": True}),
    ],
)
def test_training_on_the_gradients_equals_keras(optimizer, mode, worker, batches):
    model = network()
    model.compile(optimizer(), "mse", metrics=["mae"], **mode)
    there = worker(model, batches[0])
    logs = follow(there, batches)
    expected = fit(model, batches)
    np.testing.assert_allclose(
        np.asarray(there.weights), there.layout.flatten([v.numpy() for v in model.trainable_variables]), atol=2e-6
    )
    assert logs == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(there.model.non_trainable_variables, model.non_trainable_variables, strict=True):
        if mine.name == "seed_generator_state":  # Keras draws once more when it finds the data at its end
            assert mine.numpy()[1] == len(batches)
        else:
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def test_the_step_is_traced_once_and_once_more_for_the_tail(worker, batches):
    model = network()
    model.compile("sgd", "mse")
    there = worker(model, batches[0])
    follow(there, batches[:5])
    assert there.step.traces == 1
    follow(there, batches * 2)
    assert there.step.traces == 2


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_gives_float32_gradients(policy, worker, batches):
    model = network(policy)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    there = worker(model, batches[0])
    follow(there, batches)
    fit(model, batches)
    assert there.step(np.asarray(there.weights), batches[0]).gradient.dtype == tf.float32
    np.testing.assert_allclose(
        np.asarray(there.weights), there.layout.flatten([v.numpy() for v in model.trainable_variables]), atol=2e-2
    )


@pytest.mark.feature("Dynamic loss scaling of float16", area="Optimizers")
def test_the_float16_scale_halves_on_overflow_and_doubles_after_finite_steps(worker, batches):
    model = keras.Sequential([layers.Dense(1, dtype="mixed_float16")])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 1024.0, dynamic_growth_steps=2)
    model.compile(optimizer, "mse")
    x, y = batches[0]
    there = worker(model, (x, y))
    weights = np.asarray(there.weights)
    scale = there.model.optimizer.loss_scale._scale
    assert there.step(weights, (x, y)).finite
    assert not there.step(weights, (x, y * 1e30)).finite
    assert float(scale) == 512.0
    plain = there.step(weights, (x, y)).gradient
    assert float(scale) == 512.0
    there.step(weights, (x, y))
    assert float(scale) == 1024.0
    np.testing.assert_allclose(there.step(weights, (x, y)).gradient, plain, rtol=1e-2)


@pytest.mark.parametrize(
    ("optimizer", "loss", "mode"),
    [
        (OPTIMIZERS[2], "mse", {}),
        (OPTIMIZERS[2], SUM, {"jit_compile": True}),
        (OPTIMIZERS[3], "mse", {"run_eagerly": True}),
        (OPTIMIZERS[3], SUM, {}),
        (with_dynamic_scale, "mse", {"jit_compile": True}),
        (with_dynamic_scale, SUM, {"run_eagerly": True}),
    ],
)
def test_a_large_gradient_leaves_in_pieces(optimizer, loss, mode, worker, batches, monkeypatch):
    monkeypatch.setattr(tensorflow_step, "IN_PIECES", 20)
    monkeypatch.setattr(tensorflow_step, "CUT_TOGETHER", 12)
    model = network()
    model.compile(optimizer(), loss, **mode)
    first, second = worker(model, batches[0]), worker(model, batches[0])
    step = GradientStep(second.model, second.layout, loss_scale=second.manifest.loss_scale, in_pieces=True)
    weights = np.asarray(first.weights)
    for batch in batches:
        whole, pieces = first.step(weights, batch), step(weights, batch)
        assert len(list(pieces.gradient.arrays)) > 1
        np.testing.assert_array_equal(pieces.vector, whole.vector)
        assert pieces.finite == whole.finite
        assert str(pieces.denominator) == str(whole.denominator)


def test_a_small_gradient_is_whole(worker, batches):
    model = network()
    model.compile("sgd", "mse")
    there = worker(model, batches[0])
    step = GradientStep(there.model, there.layout, in_pieces=True)
    assert step(np.asarray(there.weights), batches[0]).gradient.shape == (there.layout.size,)


def test_a_loss_function_may_return_a_number_of_python(worker, batches):
    model = network()
    model.compile(keras.optimizers.SGD(0.1), lambda y, prediction: 0)
    there = worker(model, batches[0])
    result = there.step(np.asarray(there.weights), batches[0])
    (penalty,) = model.losses
    assert float(result.logs["loss"]) == pytest.approx(float(penalty))
    assert np.asarray(result.gradient).any()  # that of the regularizer


class Embedded(keras.Model):
    """Model with sparse gradients, a variable without one, and a ``train_step`` that reads the optimizer."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(10, 3)
        self.unused = layers.Dense(2)
        self.out = layers.Dense(1)

    def build(self, shape):
        self.unused.build((None, 3))
        super().build(shape)

    def call(self, x):
        return self.out(keras.ops.mean(self.table(keras.ops.cast(keras.ops.abs(x), "int32")), 1))

    def train_step(self, data):
        logs = super().train_step(data)
        return {"nested": logs, "version": self.optimizer.iterations, "rate": self.optimizer.learning_rate}


def test_sparse_and_missing_gradients_and_what_train_step_sees(worker, batches):
    model = Embedded()
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([5], [1.0, 0.25])), "mse")
    there = worker(model, batches[0])
    result = there.step(np.asarray(there.weights), batches[0], version=7)
    parts = dict(
        zip([s.name for s in there.layout.slots], there.layout.unflatten(result.gradient.numpy()), strict=True)
    )
    zero = [name for name, gradient in parts.items() if not gradient.any()]
    assert zero == ["embedded/unused/kernel", "embedded/unused/bias"] or len(zero) == 2
    assert {k: float(v) for k, v in result.logs.items() if k != "loss"} == {"version": 8.0, "rate": 0.25}
    assert float(there.step(there.weights.numpy(), batches[0]).logs["version"]) == 9.0


class Decorated(keras.Model):
    """Model whose gradient is applied inside a graph of its own."""

    def __init__(self, mode="plain"):
        super().__init__()
        self.inner, self.outer = layers.Dense(3), layers.Dense(1)
        self.mode = mode

    def call(self, x):
        return self.outer(self.inner(x))

    def train_step(self, data):
        return {"loss": self.move(*data)} if self.mode == "graph" else self.by_mode(*data)

    @tf.function
    def move(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return loss

    def by_mode(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        variables = self.trainable_variables
        pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
        if self.mode == "halves":
            self.optimizer.apply_gradients(pairs[:2])
            self.optimizer.apply_gradients(pairs[2:])
        elif self.mode == "twice":
            self.optimizer.apply_gradients(pairs)
            self.optimizer.apply_gradients(pairs)
        elif self.mode == "foreign":
            self.optimizer.apply_gradients([(pairs[0][0], keras.Variable(pairs[0][1], name="stranger"))])
        elif self.mode == "rate":
            self.optimizer.learning_rate = 3.0
        elif self.mode == "none":
            self.optimizer.apply_gradients([(None, v) for v in variables])
        return loss if self.mode == "no dict" and self.optimizer.apply_gradients(pairs) is not None else {"loss": loss}


def shipped(mode, worker, batches):
    model = Decorated(mode)
    model.compile("sgd", "mse")
    return worker(model, batches[0])


@pytest.mark.parametrize("mode", ["graph", "halves"])
def test_gradients_reach_the_step_from_inner_graphs_and_in_parts(mode, worker, batches):
    there, plain = shipped(mode, worker, batches), keras.Sequential([layers.Dense(3), layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.build((None, 4))
    plain.set_weights(there.model.get_weights())
    reference = worker(plain, batches[0])
    for batch in batches:
        np.testing.assert_allclose(
            there.step(np.asarray(there.weights), batch).gradient,
            reference.step(np.asarray(reference.weights), batch).gradient,
            rtol=1e-6,
        )


@pytest.mark.feature(
    "`train_step` that applies gradients twice, or sets the learning rate", area="Models", status="refused"
)
@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("twice", CaptureError, "twice"),
        ("foreign", CaptureError, "stranger"),
        ("rate", CaptureError, "schedule"),
        ("nothing", CaptureError, "no gradient to send"),
        ("none", ValueError, "No gradients provided"),
        ("no dict", CaptureError, "dictionary"),
    ],
)
def test_a_train_step_that_cannot_be_distributed_is_refused_with_the_reason(mode, error, words, worker, batches):
    def train():
        there = shipped(mode, worker, batches)
        there.step(np.asarray(there.weights), batches[0])

    with pytest.raises(error, match=words):
        train()


def test_weights_of_another_size_are_refused(worker, batches):
    model = network()
    model.compile("sgd", "mse")
    there = worker(model, batches[0])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        there.step(np.zeros(3, "f4"), batches[0])


def test_evaluation_equals_keras(worker, batches):
    model = network()
    model.compile("sgd", "mse", metrics=["mae"])
    there = worker(model, batches[0])
    evaluate = evaluation_step(there.model, there.layout)
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model.set_weights([w * 0.5 for w in model.get_weights()])
    for variable, mine in zip(model.non_trainable_variables, there.model.non_trainable_variables, strict=True):
        mine.assign(variable.numpy())
    weights = there.layout.flatten([v.numpy() for v in model.trainable_variables])
    for batch in batches:
        logs = evaluate(weights, batch)
    expected = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    assert {name: float(value) for name, value in logs.items()} == pytest.approx(expected, rel=1e-5)


def test_no_state_of_the_step_grows(worker, batches):
    model = network()
    model.compile("sgd", "mse")
    there = worker(model, batches[0])
    there.step(np.asarray(there.weights), batches[0])
    assert there.model.optimizer.gradients.recorded == {}


def test_a_step_keeps_nothing_of_its_number(worker, batches):
    """Case: TensorFlow keeps the tensors that it makes of Python numbers for ever, 0.7 kB for each."""
    model = network()
    model.compile("sgd", "mse")
    there = worker(model, batches[0])
    weights, batch = np.asarray(there.weights), there.step.prepare(batches[0])

    def train(versions):
        for version in versions:
            there.step(weights, batch, version=version)

    train(range(1000, 1010))
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        train(range(2000, 2300))
        gc.collect()
        grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        tracemalloc.stop()
    kept = sum(one.count_diff for one in grown if one.traceback[0].filename.endswith("backends/tensorflow_step.py"))
    assert kept < 100


def test_a_vector_is_assigned_to_variables_of_any_size(monkeypatch):
    monkeypatch.setattr(tensorflow_step, "CUT_TOGETHER", 10)  # runs of small neighbours, and a larger one alone
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(n) for n in (3, 1, 1, 5, 2))])
    layout = layout_of(model)
    weights = np.arange(layout.size, dtype=np.float32)
    setter = tensorflow_step.WeightSetter(model, layout)
    assert [len(run) for run in setter._runs] != [len(layout.slots)]
    setter(weights)
    found = [np.asarray(variable.value).reshape(-1) for variable in model.trainable_variables]
    np.testing.assert_array_equal(np.concatenate(found), weights)
    np.testing.assert_array_equal(setter.read(), weights)
