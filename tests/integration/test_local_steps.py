"""Local steps: the script's optimizer on the workers, which exchange what several steps have changed."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.support.local_cluster import flat, train
from tests.support.scripts import answer

pytestmark = pytest.mark.processes


def decayed(epochs=3, rows=500, batch=20):
    return keras.optimizers.schedules.CosineDecay(0.1, epochs * rows // batch, warmup_target=0.2, warmup_steps=10)


class DoubledRate(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, schedule):
        self.schedule = schedule

    def __call__(self, step):
        return 2 * self.schedule(step)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.005, weight_decay=0.01),
    "cosine": lambda: keras.optimizers.SGD(decayed()),
    "black box": lambda: keras.optimizers.RMSprop(0.002),
}


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(x))
    return (x / 16.0).astype("float32")[order], y[order].astype("int64")


def dense(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("name", ["adamw", "cosine"])
def test_the_rate_of_local_steps_is_that_of_the_script_times_a_factor(digits, name):
    x, y = digits[0][:500], digits[1][:500]
    at = {"adamw": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01), "cosine": keras.optimizers.SGD}[name]
    rates = {"adamw": (0.0025, 0.005), "cosine": (decayed(), DoubledRate(decayed()))}[name]
    alone = dense(at(rates[1]))
    alone.fit(x, y, batch_size=20, epochs=3, shuffle=False, verbose=0)
    overrides = {"local_steps": 7, "codec": "identity", "local_rate": 2.0}
    options = {"algorithm": "local-ddc", "overrides": overrides, "transport": "in_process", "epochs": 3}
    outcome = train(dense(at(rates[0])), x, y, **options, workers=1, shards=1, batch_size=20)
    np.testing.assert_allclose(outcome.weights, flat(alone), rtol=2e-3, atol=2e-5)


@pytest.mark.feature("One worker with local steps equals plain `fit`", area="Algorithms")
@pytest.mark.parametrize(("steps", "transport"), [(1, "in_process"), (7, "shared_memory")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_keras(digits, name, steps, transport):
    x, y = digits[0][:500], digits[1][:500]
    alone = dense(OPTIMIZERS[name]())
    history = alone.fit(x, y, batch_size=20, epochs=3, shuffle=False, verbose=0).history
    options = {"algorithm": "local-ddc", "overrides": {"local_steps": steps, "codec": "identity"}}
    outcome = train(
        dense(OPTIMIZERS[name]()), x, y, **options, transport=transport, workers=1, shards=2, batch_size=20, epochs=3
    )
    np.testing.assert_allclose(outcome.weights, flat(alone), rtol=2e-3, atol=2e-5)
    for epoch, event in enumerate(outcome.epochs):
        for key, values in history.items():
            np.testing.assert_allclose(event["logs"][key], values[epoch], rtol=2e-3, err_msg=f"{key}, {epoch}")


@pytest.mark.parametrize(("algorithm", "least"), [("local-ddc", 0.85), ("diloco", 0.6)])
def test_several_workers_learn_and_train_every_sample_once(digits, algorithm, least):
    x, y = digits[0][:1344], digits[1][:1344]
    options = {"algorithm": algorithm, "overrides": {"local_steps": 4, "codec": "identity"}}
    outcome = train(
        dense(OPTIMIZERS["momentum"]()),
        x,
        y,
        **options,
        workers=4,
        shards=2,
        transport="stream",
        step_ms=(1, 1, 2, 4),
        batch_size=16,
        epochs=12,
        shuffle=True,
        validation=(digits[0][1344:], digits[1][1344:]),
    )
    assert outcome.epochs[-1]["val_logs"]["accuracy"] > least
    assert all(event["samples"] == 1344 for event in outcome.epochs)


SCRIPT = """
import json
import keras
import numpy as np
from sklearn.datasets import load_digits
import nfdt

x, y = load_digits(return_X_y=True)
x, y = (x / 16).astype("float32"), y.astype("int64")
rate = keras.optimizers.schedules.CosineDecay(0.1, 4 * 1280 // 16, alpha=0.001)
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")])
model.compile(keras.optimizers.SGD(rate, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
with nfdt.session(algorithm=ALGORITHM, workers=3, OPTIONS):
    history = model.fit(x[:1280], y[:1280], batch_size=16, epochs=4, verbose=0, validation_data=(x[1280:], y[1280:]))
print(json.dumps(dict(
    accuracy=history.history["val_accuracy"][-1], iterations=int(model.optimizer.iterations),
    rate=float(model.optimizer.learning_rate), velocity=float(np.abs(model.optimizer.variables[2]).sum()),
    samples=sum(row["samples"] for row in history.nfdt.values()),
    sizes=[row.get("batch_sizes", {}) for row in history.nfdt.values()],
)))
"""


def script(algorithm, **options):
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return SCRIPT.replace("ALGORITHM", repr(algorithm)).replace("OPTIONS", text)


@pytest.mark.parametrize("algorithm", ["local-ddc", "diloco"])
def test_a_schedule_ends_where_it_ends_on_one_machine_and_the_optimizer_comes_back(run_script, algorithm):
    got = answer(run_script(script(algorithm, local_steps=8, emulate={"step_ms": [2, 2, 6]}, epoch_overlap=False)))
    assert got["iterations"] == 4 * 80
    assert got["rate"] == pytest.approx(0.1 * 0.001, rel=1e-3)
    assert got["velocity"] > 0
    assert got["samples"] == 4 * 1280
    assert got["accuracy"] > (0.8 if algorithm == "local-ddc" else 0.6)
    assert max(int(size) for sizes in got["sizes"] for size in sizes) >= 8 * 16


def test_a_worker_that_is_killed_in_the_middle_of_a_round_costs_only_that_round(run_script):
    options = {"local_steps": 8, "emulate": {"step_ms": [2, 2, 2], "fail": "1@45"}, "epoch_overlap": False}
    got = answer(run_script(script("local-ddc", **options)))
    assert got["samples"] == 4 * 1280
    assert got["accuracy"] > 0.8


@pytest.mark.parametrize("step", [28, 31])
def test_a_worker_that_is_killed_as_it_begins_the_next_epoch_costs_only_that_part(run_script, step):
    emulate = {"step_ms": [10, 10, 10], "bandwidth_mbit": [0.5, 0.5, 0.5], "fail": f"1@{step}"}
    text = script("local-ddc", local_steps=8, emulate=emulate)
    text = text.replace(", validation_data=(x[1280:], y[1280:])", "")  # workers that validate begin no epoch early
    text = text.replace('history.history["val_accuracy"][-1]', "model.evaluate(x[1280:], y[1280:], verbose=0)[1]")
    got = answer(run_script(text))
    assert got["samples"] == 4 * 1280
    assert got["accuracy"] > 0.8


def test_auto_finds_the_steps_for_a_slow_link(run_script):
    options = {"local_steps": "auto", "emulate": {"step_ms": [4, 4, 4], "bandwidth_mbit": [2, 1000, 1000]}}
    text = script("local-ddc", **options, codec="identity", epoch_overlap=False)
    got = answer(run_script(text.replace("batch_size=16", "batch_size=4")))
    assert max(map(int, got["sizes"][0])) == 64 * 4
    assert got["accuracy"] > 0.6


AUTO = """
class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_train_end(self, logs=None):
        self.calls.append("end")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            bias = model.layers[-1].bias
            bias.assign(bias + 10.0)  # changes no output; the next job must have it
        if epoch == 2:
            self.model.stop_training = True

seen = Seen()
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")])
model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
emulate = {"step_ms": [5, 5], "bandwidth_mbit": [0.3, 0.3]}
with nfdt.session(algorithm="auto", workers=2, emulate=emulate):
    history = model.fit(x[:640], y[:640], batch_size=16, epochs=1000, verbose=0, callbacks=[seen])
print(json.dumps(dict(
    calls=seen.calls, epochs=history.epoch, accuracy=history.history["accuracy"],
    samples=sum(row["samples"] for row in history.nfdt.values()),
    sizes=[int(size) for row in history.nfdt.values() for size in row["batch_sizes"]],
    bias=float(np.mean(model.layers[-1].bias)),
)))
"""


def test_auto_goes_on_with_local_steps_where_workers_mostly_exchange(run_script):
    done = run_script(SCRIPT[: SCRIPT.index("rate =")] + AUTO)
    got = answer(done)
    assert "from epoch 2 on with local steps" in done.stderr
    assert done.stderr.count("nfdt: job ") == 2
    assert got["calls"] == ["begin", 0, 1, 2, "end"]
    assert got["epochs"] == [0, 1, 2]
    assert got["samples"] == 3 * 640
    assert max(got["sizes"]) > 2 * 16, "a push has several steps"
    assert got["accuracy"][2] > max(0.8, got["accuracy"][0])
    assert got["bias"] == pytest.approx(10.0, abs=0.5), "what a callback changed between the two jobs"
