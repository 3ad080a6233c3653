"""Calls of ``evaluate`` and ``predict`` in a session: which of them go to the cluster, and what happens if it fails."""

from __future__ import annotations

import contextlib
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from nfdt_client import decorator
from nfdt_client.evaluation import estimate_gain
from nfdt_client.handle import JobHandle
from nfdt_client.options import resolve

from nfdt.core.errors import JobFailed, UsageError
from nfdt.core.events import Event
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
SUCCEEDED = {"state": "succeeded"}
FAILED = {"state": "failed", "reason": "a worker caught fire"}


class Penalized(keras.Model):
    """Model whose ``test_step`` returns a log that is no result of a metric."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def test_step(self, data):
        return {**super().test_step(data), "penalty": keras.ops.sum(data[0])}


class Counter(keras.Model):
    """Model that counts its calls."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.calls = self.add_weight(name="calls", initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return self.dense(x)


class Hooks(keras.callbacks.Callback):
    """Callback that records the hooks of evaluation and prediction."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_test_begin(self, logs=None):
        self.calls.append("test begin")

    def on_test_end(self, logs=None):
        self.calls.append(sorted(logs))

    def on_predict_begin(self, logs=None):
        self.calls.append("predict begin")

    def on_predict_end(self, logs=None):
        self.calls.append("predict end")


class BatchHooks(Hooks):
    """Callback with a hook between batches of both."""

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(batch)

    on_predict_batch_begin = on_test_batch_end


class Raised(keras.layers.Layer):
    """Layer that refuses its input."""

    def call(self, x):
        raise ZeroDivisionError("mine")


def build(*layers):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def built(model):
    model.compile("sgd", "mse")
    model(X)
    return model


@pytest.fixture
def open_session(fake):
    return lambda **options: decorator.session(**{"server": fake.address, "token": TOKEN, **options})


@pytest.fixture
def reasons(caplog):
    """Return what the log gives as reasons for calls in this process."""
    caplog.set_level(logging.INFO, "nfdt_client.evaluation")
    return lambda: [text for r in caplog.records if "runs in this process: " in (text := r.getMessage())]


def result_of(call):
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("make", "call", "reason"),
    [
        (build, lambda m: m.evaluate(iter([(X, Y)]), verbose=0), "not arrays"),
        (build, lambda m: m.predict(((X for _ in range(2))), verbose=0), "not arrays"),
        (build, lambda m: m.evaluate(X, Y, verbose=0, callbacks=[BatchHooks()]), "between batches"),
        (build, lambda m: m.predict(X, verbose=0, callbacks=[BatchHooks()]), "between batches"),
        (build, lambda m: m.evaluate(X, Y, verbose=0, steps=3), "more steps"),
        (build, lambda m: m.evaluate(X, Y[:2], verbose=0), "Keras refuses its data"),
        (build, lambda m: m.evaluate(X, Y, verbose=0, unknown=1), "arguments"),
        (build, lambda m: m.evaluate(X[:, :2], Y, verbose=0), "first batch fails"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), lambda m: m.predict(X, verbose=0), "not compiled"),
        (lambda: built(Penalized()), lambda m: m.evaluate(X, Y, verbose=0), "penalty"),
        (lambda: built(Counter()), lambda m: m.predict(X, verbose=0), "changes the variable"),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_what_the_cluster_cannot_do_is_done_here_as_without_a_session(open_session, fake, reasons, make, call, reason):
    keras.utils.set_random_seed(1)
    expected = result_of(lambda: call(make()))
    keras.utils.set_random_seed(1)
    with open_session(evaluate=True):
        received = result_of(lambda: call(make()))
    assert fake.jobs.jobs == {}
    assert len(reasons()) == 1
    assert reason in reasons()[0]
    if isinstance(expected, tuple):
        assert received[0] is expected[0]
    else:
        np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "not trained on the cluster in this session"),
        ({"evaluate": False}, "evaluate=False"),
        ({"evaluate": True, "algorithm": "group-sync"}, "trains on ranks"),
    ],
)
def test_options_keep_a_call_here(open_session, fake, reasons, options, reason):
    with open_session(**options):
        build().evaluate(X, Y, verbose=0)
    assert fake.jobs.jobs == {}
    assert [reason in text for text in reasons()] == [True]


def test_by_default_a_small_call_after_a_fit_stays_here(open_session, fake, reasons):
    with open_session():
        model = build()
        model.fit(X, Y, verbose=0)
        model.predict(X, verbose=0)
    assert len(fake.jobs.jobs) == 1
    assert "the cluster would save -1.0 s" in reasons()[0]


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_by_default_a_call_that_the_cluster_fails_is_done_here(open_session, fake, reasons, monkeypatch, method):
    monkeypatch.setattr("nfdt_client.evaluation.LEAST_S", -9.0)
    hooks, model = Hooks(), build()
    with open_session():
        model.fit(X, Y, verbose=0)
        fake.jobs.start_failure = FAILED
        data = (X, Y) if method == "evaluate" else (X,)
        received = getattr(model, method)(*data, verbose=0, callbacks=[hooks])
    np.testing.assert_array_equal(received, getattr(model, method)(*data, verbose=0))
    assert [job.spec.method for job in fake.jobs.jobs.values()] == ["fit", method]
    assert hooks.calls == (["test begin", ["loss"]] if method == "evaluate" else ["predict begin", "predict end"])
    assert "a worker caught fire" in reasons()[0]


def test_other_jobs_in_all_slots_keep_a_call_here(open_session, fake, reasons, monkeypatch):
    monkeypatch.setattr("nfdt_client.evaluation.LEAST_S", -9.0)
    with open_session(workers=3):
        model = build()
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    assert len(fake.jobs.jobs) == 1
    assert "other jobs" in reasons()[0]


def test_with_evaluate_true_the_failure_is_raised(open_session, fake):
    fake.jobs.start_failure = FAILED
    with open_session(evaluate=True), pytest.raises(JobFailed, match="caught fire"):
        build().evaluate(X, Y, verbose=0)
    with open_session(evaluate=True, fallback="local"):
        assert build().evaluate(X, Y, verbose=0) > 0


def test_the_job_has_the_rows_of_the_steps_and_is_cancelled_with_the_script(open_session, fake, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("nfdt_client.evaluation._state_of", interrupt)
    with open_session(evaluate=True), pytest.raises(KeyboardInterrupt):
        build().evaluate(X, Y, batch_size=3, steps=2, verbose=0)
    assert (fake.jobs.job.spec.validation.samples, fake.jobs.job.spec.fit.batch_size) == (6, 3)
    assert [action for action, _ in fake.jobs.job.asked] == ["cancel"]


def test_the_script_s_random_numbers_are_untouched(open_session, fake):
    import random

    fake.jobs.start_failure = FAILED
    states = []
    with open_session(evaluate=True), contextlib.suppress(JobFailed):
        model = build()
        states.append((random.getstate(), np.random.get_state()[1].tolist()))
        try:
            model.evaluate(X, Y, verbose=0)
        finally:
            states.append((random.getstate(), np.random.get_state()[1].tolist()))
    assert states[0] == states[1]


def test_the_result_of_an_evaluation_is_no_trained_model():
    events = [Event(1, 0.0, "result", {"artifact": "", "method": "evaluate"}), Event(2, 0.0, "state", SUCCEEDED)]
    handle = JobHandle("job-1", SimpleNamespace(watch=lambda *_: iter(events), show=lambda _: None))
    with pytest.raises(UsageError, match=r"job-1: expected a job that trains.* model.evaluate"):
        handle.result()


# ---- the option and the estimate


@pytest.mark.parametrize(("given", "mode"), [(True, "true"), (False, "false"), ("auto", "auto"), ("True", "true")])
def test_the_option_is_a_boolean_or_auto(given, mode):
    assert resolve({"evaluate": given}, environ={}).evaluate == mode


def test_another_value_of_the_option_is_refused():
    with pytest.raises(UsageError, match=r"evaluate: expected one of auto, True, False. Received: 'workers'"):
        resolve({"evaluate": "workers"}, environ={})


def record(host="a", device="cpu", **speed):
    return {"host": host, "device": device, "batch_size": 10, "step_s": 0.02, "step_exchange_s": 0.005, **speed}


def gain(workers, samples=100_000, batch_size=100, **more):
    arguments = {"x": np.zeros((samples, 1)), "batch_size": batch_size, "steps": None}
    return estimate_gain(dict(enumerate(workers)), {**arguments, **more}, remote=False)


def test_workers_on_one_machine_save_the_work_besides_the_model():
    assert gain([record(), record()], batch_size=1) == pytest.approx(30 - 1)
    assert gain([record(), record()]) == gain([record()]) == pytest.approx(0.3 - 1)


@pytest.mark.parametrize("others", [{"host": "b"}, {"device": "gpu:1"}], ids=json.dumps)
def test_other_machines_and_devices_share_the_computation(others):
    compute_s = 100_000 * 0.0015 / 3
    assert gain([record(), record(**others)]) == pytest.approx(0.3 - 1 + compute_s / 2)


def test_steps_limit_the_rows():
    assert gain([record()], batch_size=1, steps=10_000) == pytest.approx(3 - 1)


def test_data_travel_to_a_remote_server():
    arguments = {"x": np.zeros(10**6, "float64"), "batch_size": 10**6, "steps": None}
    here, there = (estimate_gain({"w": record()}, arguments, remote=remote) for remote in (False, True))
    assert here - there == pytest.approx(0.08)


def test_without_measured_speeds_nothing_is_saved():
    assert gain([record(step_s=None)], batch_size=1) < 0
