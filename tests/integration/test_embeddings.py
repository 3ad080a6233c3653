"""Models with an embedding: they train as in plain Keras, by rows or not, and send few bytes by rows."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.local_cluster import clone, flat, train

pytestmark = pytest.mark.processes

WORDS, WIDTH, LENGTH = 4096, 32, 6
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
SQUARED = ("adam", "adagrad")  # Keras squares the gradients of a word's places singly


@pytest.fixture(scope="module")
def sentences():
    """Return sentences in which few words are frequent and occur twice: most rows are never updated."""
    rng = np.random.default_rng(5)
    x = rng.choice(300, size=(200, LENGTH), p=np.arange(300, 0, -1) / 45150).astype("int32") * 13
    return x, (x.sum(1) % 3).astype("int32")


@pytest.fixture(scope="module")
def distinct():
    """Return sentences in batches of 20 without repeated words, of which half never occur."""
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.permutation(WORDS // 2)[:240].reshape(40, LENGTH) for _ in range(5)]).astype("int32")
    return x, (x.sum(1) % 3).astype("int32")


class Scaled(keras.layers.Embedding):
    """Embedding of a library: a subclass that looks rows up."""

    def call(self, inputs):
        return 2 * super().call(inputs)


class Mixed(keras.layers.Embedding):
    """Subclass that also adds the mean of all rows."""

    def call(self, inputs):
        return super().call(inputs) + keras.ops.mean(self.embeddings, axis=0)


class LazyAdam(keras.optimizers.Adam):
    """Adam that restores the rows and moments without a gradient."""

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        rows = [variable, self._momentums[index], self._velocities[index]]
        before = [tf.identity(tf.convert_to_tensor(row)) for row in rows]
        gradient = tf.convert_to_tensor(gradient)
        super().update_step(gradient, variable, learning_rate)
        if variable.shape == (WORDS, WIDTH):
            touched = tf.reduce_any(gradient != 0, axis=-1, keepdims=True)
            for row, kept in zip(rows, before, strict=True):
                row.assign(tf.where(touched, tf.convert_to_tensor(row), kept))


def model(optimizer, table=keras.layers.Embedding):
    layers = [table(WORDS, WIDTH), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    made = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
    made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


@pytest.mark.feature("Embeddings exchanged by rows", area="Models")
@pytest.mark.parametrize(
    ("name", "algorithm", "shards", "transport"),
    [
        ("sgd", "ddc-asgd", 1, "stream"),
        ("sgd", "asgd", 3, "shared_memory"),
        ("sgd", "dc-asgd-a", 1, "in_process"),
        ("momentum", "ddc-asgd", 3, "stream"),
        ("adam", "ddc-asgd", 3, "stream"),
        ("adagrad", "ddc-asgd", 2, "stream"),
        ("adagrad", "bsp", 1, "stream"),
        ("adagrad", "dc-asgd-a", 1, "in_process"),
    ],
)
def test_one_worker_equals_plain_fit(sentences, distinct, name, algorithm, shards, transport):
    x, y = distinct if name in SQUARED else sentences
    fit = {"batch_size": 20, "epochs": 2}
    local, job = clone(model, OPTIMIZERS[name]()), clone(model, OPTIMIZERS[name]())
    history = local.fit(x, y, shuffle=False, verbose=0, validation_data=(x[:50], y[:50]), **fit).history
    outcome = train(
        job, x, y, algorithm=algorithm, shards=shards, transport=transport, validation=(x[:50], y[:50]), **fit
    )
    np.testing.assert_allclose(outcome.weights, flat(local), rtol=2e-3, atol=2e-5)
    for epoch, event in enumerate(outcome.epochs):
        np.testing.assert_allclose(event["logs"]["loss"], history["loss"][epoch], rtol=1e-3)
        np.testing.assert_allclose(event["val_logs"]["loss"], history["val_loss"][epoch], rtol=1e-3)
    for index, variable in enumerate(local.optimizer.variables):
        np.testing.assert_allclose(outcome.optimizer[index], np.asarray(variable), rtol=1e-2, atol=2e-5)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_bsp_with_4_workers_equals_one_process_with_the_4_fold_batch(sentences, distinct, name):
    x, y = (part[:190] for part in (distinct if name in SQUARED else sentences))
    local, job = clone(model, OPTIMIZERS[name]()), clone(model, OPTIMIZERS[name]())
    local.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    outcome = train(job, x, y, algorithm="bsp", workers=4, shards=2, transport="stream", batch_size=10, epochs=2)
    np.testing.assert_allclose(outcome.weights, flat(local), rtol=2e-4, atol=2e-5)
    assert sum(sent for sent, _ in outcome.traffic) < 4 * outcome.weights.size  # of 40 gradients


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("sgd", {}),
        ("sgd", {"overlap": 1}),
        ("sgd", {"update_rule": "dc-a"}),
        ("adagrad", {}),
        ("adam", {"sparse": "lazy", "overlap": 1}),
    ],
    ids=str,
)
def test_three_workers_train_every_sample_by_rows(sentences, name, overrides):
    x, y = sentences
    outcome = train(
        clone(model, OPTIMIZERS[name]()), x, y, algorithm="ddc-asgd", overrides=overrides,
        workers=3, shards=2, transport="stream", batch_size=20, epochs=4, validation=(x, y),
    )  # fmt: skip
    assert int(outcome.optimizer[0]) == 40
    assert sum(done.samples for done in outcome.done) == 4 * 200
    assert np.isfinite(outcome.weights).all()


@pytest.mark.parametrize("table", [Scaled, Mixed])
@pytest.mark.parametrize("shards", [1, 2])
def test_subclasses_equal_plain_fit(distinct, table, shards):
    """Case: only the gradients of one of them are of rows."""
    x, y = distinct
    local, job = (clone(lambda optimizer: model(optimizer, table), OPTIMIZERS["adagrad"]()) for _ in range(2))
    local.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    outcome = train(
        job, x, y, algorithm="ddc-asgd", shards=shards, transport="stream", batch_size=20, epochs=2
    )  # fmt: skip
    np.testing.assert_allclose(outcome.weights, flat(local), rtol=2e-3, atol=2e-5)
    few = outcome.traffic[0][0] < 20 * 4 * outcome.weights.size * 0.1
    assert few == (table is Scaled)


@pytest.mark.parametrize(("algorithm", "shards"), [("ddc-asgd", 2), ("bsp", 1), ("dc-asgd", 1)])
def test_a_lazy_adam_leaves_other_rows_as_they_are(sentences, algorithm, shards):
    x, y = sentences
    local, job = clone(model, LazyAdam(0.01)), clone(model, keras.optimizers.Adam(0.01))
    start = flat(job)
    fit = {"batch_size": 20, "epochs": 2}
    local.fit(x, y, shuffle=False, verbose=0, **fit)
    outcome = train(
        job, x, y, algorithm=algorithm, overrides={"sparse": "lazy"}, shards=shards, transport="stream", **fit
    )  # fmt: skip
    np.testing.assert_allclose(outcome.weights, flat(local), rtol=2e-3, atol=5e-5)
    for index, variable in enumerate(local.optimizer.variables):
        np.testing.assert_allclose(outcome.optimizer[index], np.asarray(variable), rtol=1e-2, atol=2e-5)
    others = np.setdiff1d(np.arange(WORDS), x)
    held, trained = (weights[: WORDS * WIDTH].reshape(WORDS, WIDTH) for weights in (start, outcome.weights))
    assert np.array_equal(trained[others], held[others])
    assert outcome.traffic[0][0] < 20 * 4 * outcome.weights.size * 0.1


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_rows_are_a_small_part_of_the_bytes(sentences, name):
    x, y = sentences
    dense, sparse = (
        train(
            clone(model, OPTIMIZERS[name]()), x, y, algorithm="asgd", overrides={"sparse": by_rows},
            transport="stream", batch_size=10, epochs=2,
        )
        for by_rows in (False, True)
    )  # fmt: skip
    np.testing.assert_allclose(sparse.weights, dense.weights, rtol=2e-5, atol=2e-6)
    size = 4 * dense.weights.size
    assert dense.traffic[0][0] > 40 * size
    assert sparse.traffic[0][0] < 40 * size * 0.03
    assert sparse.traffic[0][1] < 3 * size  # all weights at the start of each epoch


SCRIPT = """
import json
import keras
import nfdt
import numpy as np

rng = np.random.default_rng(2)
x, y = rng.integers(0, 500, (400, 4)).astype("int32"), rng.normal(size=(400, 1)).astype("float32")

def build():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(8192, 16), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model

def fit(model):
    return model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, validation_data=(x[:40], y[:40]))

@nfdt.distribute(workers=1, shards=2)
def main():
    model = build()
    return model, fit(model)

plain, (model, history) = build(), main()
fit(plain)
pairs = zip(model.get_weights(), plain.get_weights(), strict=True)
[worker] = history.nfdt.values()
print(json.dumps({
    "same": all(bool(np.allclose(a, b, rtol=2e-3, atol=2e-5)) for a, b in pairs),
    "iterations": int(model.optimizer.iterations),
    "sent": worker["bytes_sent"] / (4 * model.count_params()),
}))
"""


def test_a_script_trains_its_embedding_by_rows_in_processes(run_script):
    done = run_script(SCRIPT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["same"]
    assert found["iterations"] == 40
    assert found["sent"] < 2  # of 40 gradients
