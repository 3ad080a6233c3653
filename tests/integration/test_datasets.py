"""A ``tf.data.Dataset`` given to ``fit``: workers run its graph, or the client feeds them and gives the reason."""

from __future__ import annotations

import pytest

from tests.support.scripts import answer

pytestmark = pytest.mark.processes

IDS = """
import json, logging, warnings
import keras
import numpy as np
import tensorflow as tf
import nfdt

N = 1000
ids = np.arange(N, dtype="float32")[:, None]

def square(y_true, y_pred):
    return y_true * y_true

def itself(y_true, y_pred):
    return y_true

class Seen(logging.Handler):
    lines = []
    def emit(self, record):
        self.lines.append(record.getMessage())

logging.captureWarnings(True)
logging.getLogger().addHandler(Seen())

def build():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[square, itself])
    return model

def fit(dataset, epochs=1, **options):
    class Steps(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.planned = self.params["steps"]
    steps = Steps()
    Seen.lines.clear()
    history = build().fit(dataset, epochs=epochs, verbose=0, callbacks=[steps], **options)
    return dict(
        itself=history.history["itself"],
        square=history.history["square"],
        samples=sum(worker["samples"] for worker in history.nfdt.values()),
        batches={int(size): sum(w["batch_sizes"].get(size, 0) for w in history.nfdt.values())
                 for w in history.nfdt.values() for size in w["batch_sizes"]},
        where=history.nfdt.data["where"], reason=history.nfdt.data["reason"],
        planned=steps.planned, lines=list(Seen.lines),
    )

def base():
    return tf.data.Dataset.from_tensor_slices((ids, ids))
"""

CASES = """
def generated():
    yield from zip(ids, ids)

shape = tf.TensorSpec((1,), tf.float32)
generator = tf.data.Dataset.from_generator(generated, output_signature=(shape, shape)).batch(250)
with nfdt.session(workers=2, algorithm="asgd"):
    got = dict(
        usual=fit(base().shuffle(N).map(lambda x, y: (x + 0, y), num_parallel_calls=2).batch(32).prefetch(2), 2),
        unknown=fit(base().filter(lambda x, y: x[0] >= 0).batch(50), 2),
        steps=fit(base().shuffle(N).batch(50), 4, steps_per_epoch=10),
        short=fit(base().batch(50), 1, steps_per_epoch=30),
        generator=fit(generator),
    )
try:
    with nfdt.session(workers=1, algorithm="asgd", data="workers"):
        fit(generator)
except TypeError as error:
    got["refused"] = str(error)
print(json.dumps(got))
"""


@pytest.fixture(scope="module")
def got(script_fork_server, tmp_path_factory):
    script = tmp_path_factory.mktemp("datasets") / "script.py"
    script.write_text(IDS + CASES)
    return answer(script_fork_server.run(script))


ALL = [499.5]
SQUARES = [332833.5]


@pytest.mark.feature("`tf.data.Dataset`, run on the workers", area="Data")
@pytest.mark.parametrize("name", ["usual", "unknown"])
def test_every_element_is_trained_once_in_every_epoch(got, name):
    case = got[name]
    assert case["where"] == "workers"
    assert case["samples"] == 2000
    assert case["itself"] == pytest.approx(ALL * 2, rel=1e-6)
    assert case["square"] == pytest.approx(SQUARES * 2, rel=1e-5)


def test_batches_are_those_of_the_pipeline(got):
    assert got["usual"]["batches"] == {"32": 62, "8": 2}


def test_the_number_of_batches_is_known_where_keras_knows_it(got):
    assert got["usual"]["planned"] == 32
    assert got["unknown"]["planned"] is None
    assert got["steps"]["planned"] == 10


def test_an_iteration_goes_on_over_epochs_of_limited_steps(got):
    means = got["steps"]["itself"]
    assert got["steps"]["samples"] == 2000
    for first, second in (means[:2], means[2:]):
        assert (first + second) / 2 == pytest.approx(499.5, rel=1e-6)
        assert first != pytest.approx(499.5, rel=1e-6)


def test_data_that_end_early_end_the_epoch_with_a_warning(got):
    assert got["short"]["samples"] == 1000
    assert any("Your input ran out of data" in line for line in got["short"]["lines"])


@pytest.mark.feature("`tf.data` pipelines that cannot be divided", area="Data", note="read in the script")
def test_other_pipelines_are_read_in_the_client_with_a_reason(got):
    assert got["generator"]["where"] == "client"
    assert "runs Python code of this process" in got["generator"]["reason"]
    assert got["generator"]["samples"] == 1000
    assert len([line for line in got["generator"]["lines"] if "in this process, not on the workers" in line]) == 1


@pytest.mark.feature('`data="workers"` for data that only the script can read', area="Data", status="refused")
def test_a_pipeline_that_workers_cannot_run_is_refused_where_they_must(got):
    assert "data='workers'" in got["refused"]
    assert "runs Python code of this process" in got["refused"]
