"""Workers of different, emulated speeds: batches and tasks follow the speeds, and no sample is lost."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from statistics import median

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from nfdt.coordinator import training
from tests.support.local_cluster import clone, flat, train

pytestmark = pytest.mark.processes

FAST, SLOW = ("worker-0", "worker-1"), ("worker-2", "worker-3")
STEP_MS = (20.0, 20.0, 80.0, 80.0)  # of a batch of 16: speeds 4, 4, 1, 1


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16.0).astype("float32"), y


def dense(optimizer):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(10, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run(digits, algorithm, samples=1797, **options):
    x, y = digits[0][:samples], digits[1][:samples]
    options = {"workers": 4, "batch_size": 16, "epochs": 2, "step_ms": STEP_MS, **options}
    outcome = train(clone(dense, keras.optimizers.SGD(0.1)), x, y, algorithm=algorithm, **options)
    assert [epoch["samples"] for epoch in outcome.epochs] == [samples] * options["epochs"]
    return outcome


def slow_over_fast(samples):
    return sum(samples[w] for w in SLOW) / sum(samples[w] for w in FAST)


def test_dynamic_batches_in_rounds_equal_one_process_though_a_worker_dies(digits):
    outcome = run(digits, "bsp", 1600, overrides={"batch": "dbs"}, lose=("worker-1", 35))
    assert [epoch["steps"] for epoch in outcome.epochs] == [25, 25]
    assert [data["worker"] for kind, data in outcome.events if kind == "worker_lost"] == ["worker-1"]
    local = clone(dense, keras.optimizers.SGD(0.1))
    local.fit(digits[0][:1600], digits[1][:1600], batch_size=64, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(outcome.weights, flat(local), rtol=5e-4, atol=5e-5)


@pytest.mark.feature("Dynamic batch sizes (`dbs`)", area="Algorithms")
def test_dynamic_batches_make_steps_of_equal_time(digits):
    outcome = run(digits, "bsp", overrides={"batch": "dbs"})
    assert 0.15 < slow_over_fast(outcome.samples_of(1)) < 0.6  # a quarter, if nothing but the emulated time counted
    sizes = {worker: row["batch_size"] for worker, row in outcome.speeds.items()}
    assert sum(sizes.values()) == 64
    times = [row["step_s"] for row in outcome.speeds.values()]
    assert max(times) < 1.6 * min(times)  # 4 with batches of one size
    speeds = [data["workers"] for kind, data in outcome.events if kind == "speed"]
    assert set(speeds[-1]) == {*FAST, *SLOW}
    assert speeds[-1][FAST[0]]["samples_per_s"] > 2 * speeds[-1][SLOW[0]]["samples_per_s"]


def staleness_of(outcome):
    """Return the median staleness of each worker."""
    counts = outcome.staleness[0]["workers"]
    return {
        w: median(np.repeat([int(t) for t in c["staleness"]], [*c["staleness"].values()])) for w, c in counts.items()
    }


def test_dynamic_batches_even_staleness_out(digits):
    outcome = run(digits, "dbs-sgd", epochs=3)
    assert all(abs(staleness - 3) <= 1 for staleness in staleness_of(outcome).values())  # fixed: 1 to 2, and 8 to 9
    assert [epoch["steps"] for epoch in outcome.epochs] == [113] * 3


def test_a_worker_killed_with_dynamic_batches_costs_no_sample(digits):
    outcome = run(digits, "ddc-asgd", overrides={"batch": "dbs"}, lose=("worker-0", 25))
    assert [data["worker"] for kind, data in outcome.events if kind == "worker_lost"] == ["worker-0"]
    sizes = [row["batch_size"] for worker, row in outcome.speeds.items() if worker != "worker-0"]
    assert sum(sizes) == 3 * 16


def test_proportional_shares_follow_speeds(digits):
    outcome = run(digits, "asgd", overrides={"tasks": "proportional"})
    assert 0.15 < slow_over_fast(outcome.samples_of(1)) < 0.6  # a quarter, if nothing but the emulated time counted


def test_workers_finish_together(digits):
    outcome = run(digits, "asgd", 1792, overrides={"tasks": "finish-together"})  # no short batch: it would be traced
    samples, ends = outcome.samples_of(1), outcome.ends_of(1)
    assert ends.keys() >= set(FAST)  # a busy machine may make a slow worker so slow that the others end without it
    assert max(samples.get(w, 0) for w in SLOW) < min(samples[w] for w in FAST)
    assert max(ends.values()) - min(ends.values()) < 0.4 * outcome.epochs[1]["seconds"]


def test_h_ps_loses_no_sample_though_a_worker_dies(digits):
    outcome = run(digits, "h-ps", transport="stream", epochs=3, lose=("worker-0", 60))
    assert [data["worker"] for kind, data in outcome.events if kind == "worker_lost"] == ["worker-0"]
    assert outcome.epochs[-1]["logs"]["accuracy"] > outcome.epochs[0]["logs"]["accuracy"]
    last = outcome.samples_of(2)
    assert max(last[w] for w in SLOW) < last["worker-1"]


def test_leases_that_are_cut_short_lose_nothing(digits, monkeypatch):
    monkeypatch.setattr(training, "BUDGET", 1e-6)
    outcome = run(digits, "asgd", step_ms=(), epochs=3)
    rest = 1797 % 16  # a report has the task of its lease, and that which the lease before left in flight
    assert {done.samples for done in outcome.done} <= {16, 32, rest, 16 + rest}
