"""Tables that the shards alone hold: workers train, evaluate and predict as with the whole tables, bit for bit."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.model.backends.embedding import Embedding
from nfdt.model.training.predict import join_outputs, load_outputs
from tests.support.local_cluster import clone, flat, train

pytestmark = pytest.mark.processes

USERS, ITEMS, WIDTH, LENGTH = 2100, 4096, 32, 6
ON_SHARDS, ON_WORKERS = {"worker_tables_mb": 0}, {"worker_tables_mb": 1000}


@pytest.fixture(scope="module")
def visits():
    """Return users, the items that they saw (some twice) and the items before those, and whether they bought one."""
    rng = np.random.default_rng(5)
    users = rng.integers(0, USERS, (200, 1)).astype("int32")
    items, before = (rng.integers(0, 300, (200, LENGTH)).astype("int32") * 13 for _ in range(2))
    return (users, items, before), (items.sum(1) % 2).astype("float32")


def model(optimizer):
    """Return a model with two tables of which one is shared by two inputs."""
    users, items, before = (keras.Input((n,), dtype="int32") for n in (1, LENGTH, LENGTH))
    table = keras.layers.Embedding(ITEMS, WIDTH, name="items")
    found = [keras.layers.Embedding(USERS, WIDTH, name="users")(users), table(items), table(before)]
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(rows) for rows in found])
    hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(joined)))
    made = keras.Model([users, items, before], keras.layers.Dense(1, "sigmoid")(hidden))
    made.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return made


def without_dropout(optimizer):
    """Return a model whose gradients do not depend on the worker that computes them."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    rows = keras.layers.Embedding(ITEMS, WIDTH)(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Flatten()(rows)))
    made.compile(optimizer, "binary_crossentropy")
    return made


def trained(data, overrides, build=model, *, algorithm="ddc-asgd", **options):
    x, y = data
    fit = {"batch_size": 20, "epochs": 2, "transport": "stream", "validation": data, **options}
    made = clone(build, keras.optimizers.SGD(0.5))
    return train(made, x, y, algorithm=algorithm, overrides=overrides, **fit)


def assert_same(one, other):
    """Assert equal weights, and equal metrics up to the rounding of sums over memory that is aligned otherwise."""
    np.testing.assert_array_equal(one.weights, other.weights)
    for mine, theirs in zip(one.epochs, other.epochs, strict=True):
        assert mine["logs"] == pytest.approx(theirs["logs"], rel=1e-6)
        assert mine["val_logs"] == pytest.approx(theirs["val_logs"], rel=1e-6)


@pytest.mark.feature("Embeddings larger than a worker's memory", area="Models")
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("ddc-asgd", {}),
        ("asgd", {"shards": 2, "transport": "shared_memory"}),
        ("dc-asgd-a", {"shards": 3}),
        ("bsp", {"shards": 2}),
    ],
)
def test_one_worker_trains_as_with_whole_tables(visits, algorithm, options):
    outcomes = [trained(visits, overrides, algorithm=algorithm, **options) for overrides in (ON_SHARDS, ON_WORKERS)]
    assert_same(*outcomes)
    assert outcomes[0].traffic[0][1] < outcomes[1].traffic[0][1] / 2


def test_adagrad_trains_as_with_whole_tables(visits):
    def build(_):
        return model(keras.optimizers.Adagrad(0.1))

    assert_same(*(trained(visits, overrides, build, shards=2) for overrides in (ON_SHARDS, ON_WORKERS)))


def test_overlapping_pushes_train_as_with_whole_tables(visits):
    assert_same(*(trained(visits, {**overrides, "overlap": 1}, shards=2) for overrides in (ON_SHARDS, ON_WORKERS)))


@pytest.mark.parametrize(("optimizer", "shards"), [(keras.optimizers.SGD, 1), (keras.optimizers.Adagrad, 3)])
def test_tables_that_shards_make_train_as_tables_that_are_sent(visits, optimizer, shards):
    def build(*, here):
        keras.utils.set_random_seed(4)
        layer = Embedding(ITEMS, WIDTH)
        if here:
            layer.make_rows()
        inputs = keras.Input((LENGTH,), dtype="int32")
        made = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Flatten()(layer(inputs))))
        made.compile(optimizer(0.5), "binary_crossentropy")
        return made

    x, y = visits[0][1], visits[1]
    options = {"algorithm": "ddc-asgd", "overrides": ON_SHARDS, "shards": shards, "transport": "stream"}
    one, other = (
        train(build(here=here), x, y, batch_size=20, epochs=2, validation=(x, y), **options) for here in (False, True)
    )
    assert_same(one, other)
    for index, variable in other.optimizer.items():
        np.testing.assert_array_equal(one.optimizer[index], variable)


def test_bsp_with_3_workers_trains_as_with_whole_tables(visits):
    data, options = (visits[0][1], visits[1]), {"algorithm": "bsp", "workers": 3, "shards": 2, "validation": None}
    one, other = (trained(data, made, without_dropout, **options) for made in (ON_SHARDS, ON_WORKERS))
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overrides", [{}, {"overlap": 1}, {"update_rule": "dc-a"}], ids=str)
def test_two_workers_train_every_sample(visits, overrides):
    outcome = trained(visits, {**ON_SHARDS, **overrides}, workers=2, shards=2, epochs=4)
    assert int(outcome.optimizer[0]) == 40
    assert sum(done.samples for done in outcome.done) == 4 * 200
    assert np.isfinite(outcome.weights).all()
    assert outcome.epochs[-1]["logs"]["loss"] < outcome.epochs[0]["logs"]["loss"]


def test_one_worker_equals_plain_fit(visits):
    data = visits[0][1], visits[1]
    local = clone(without_dropout, keras.optimizers.SGD(0.5))
    local.fit(*data, batch_size=20, epochs=2, shuffle=False, verbose=0)
    outcome = trained(data, ON_SHARDS, without_dropout, validation=None)
    np.testing.assert_allclose(outcome.weights, flat(local), rtol=2e-3, atol=2e-5)


def test_predictions_and_metrics_are_those_of_whole_tables(visits):
    x, y = visits
    made = clone(model, keras.optimizers.SGD(0.5))
    options = {"algorithm": "asgd", "shards": 2, "workers": 2, "transport": "stream", "batch_size": 20}
    outcome = train(made, (x,), overrides=ON_SHARDS, method="predict", **options)
    pieces = [load_outputs(outcome.artifacts[name]) for name in outcome.answer.decode().split()]
    [predicted] = join_outputs(pieces, range(0, 200, 20))
    np.testing.assert_array_equal(predicted, made.predict(x, batch_size=20, verbose=0))
    one, other = (train(made, (x, y), overrides=o, method="evaluate", **options) for o in (ON_SHARDS, ON_WORKERS))
    assert one.answer == other.answer
    assert sum(received for _, received in one.traffic) < sum(received for _, received in other.traffic) / 2


SCRIPT = """
import json
import keras
import nfdt
import numpy as np

rng = np.random.default_rng(2)
x, y = rng.integers(0, 500, (400, 4)).astype("int32"), rng.normal(size=(400, 1)).astype("float32")

class Words(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows, self.flat = keras.layers.Embedding(8192, 16), keras.layers.Flatten()
        self.last = keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.flat(self.rows(x)))

def build():
    keras.utils.set_random_seed(3)
    model = Words()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model

def fit(model):
    history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, validation_data=(x[:40], y[:40]))
    return history, model.evaluate(x, y, verbose=0), model.predict(x[:64], verbose=0)

@nfdt.distribute(workers=1, shards=2, worker_tables_mb=0, evaluate=True)
def main():
    model = build()
    return model, fit(model)

plain, (model, (history, loss, outputs)) = build(), main()
expected, expected_loss, expected_outputs = fit(plain)
pairs = [*zip(model.get_weights(), plain.get_weights(), strict=True)]
pairs += [(outputs, expected_outputs), (loss, expected_loss)]
[worker] = history.nfdt.values()
print(json.dumps({
    "same": all(bool(np.allclose(a, b, rtol=2e-3, atol=2e-5)) for a, b in pairs),
    "val_loss": np.allclose(history.history["val_loss"], expected.history["val_loss"], rtol=1e-3),
    "received": worker["bytes_received"] / (4 * model.count_params()),
}))
"""


def test_a_script_with_a_model_of_its_own_trains_in_processes(run_script):
    done = run_script(SCRIPT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["same"]
    assert found["val_loss"]
    assert found["received"] < 0.5  # a worker never has the whole table
