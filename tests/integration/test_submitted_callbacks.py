"""Keras' callbacks of a detached job, on a real server: they decide as in plain ``fit``."""

from __future__ import annotations

import contextlib
import signal

import pytest
from nfdt_client.handle import attach

from tests.support.scripts import DEADLINE_S, DIGITS, answer, start_server, start_workers, stop

pytestmark = pytest.mark.processes

FIT = (
    DIGITS
    + """
import nfdt

def reductions():
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.3 if epoch == 0 else rate),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5, verbose=1),
        keras.callbacks.EarlyStopping("val_accuracy", patience=4, min_delta=0.2, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
    ]

def fit():
    keras.utils.set_random_seed(3)
    model = build()
    history = model.fit(
        x[:320], y[:320], batch_size=32, epochs=9, verbose=0, validation_data=(x[320:640], y[320:640]),
        callbacks=reductions(),
    )
    return described(model, history.history)

def described(model, history):
    return dict(history=history, weights=[float(np.abs(weight).sum()) for weight in model.get_weights()])

def fetched(handle):
    model, result = build(), handle.result(timeout_s=100)
    result.apply_to(model)
    logs = [line for line in handle.logs() if "ReduceLROnPlateau" in line]
    return dict(described(model, result.history), logs=logs, state=handle.status().state)
"""
)
SUBMIT = "handle = nfdt.submit(fit, workers=1, algorithm='bsp', options={{'emulate.step_ms': ({step_ms},)}})\n"


@contextlib.contextmanager
def running(directory):
    cluster = start_server(directory, "--allow-code")
    workers = start_workers(cluster, 1)
    try:
        yield cluster
    finally:
        stop(workers, cluster.process)


def assert_same(plain, submitted):
    assert submitted["state"] == "succeeded"
    assert len(plain["history"]["loss"]) < 9
    assert len(set(plain["history"]["learning_rate"])) > 1
    assert set(submitted["history"]) == set(plain["history"])
    for name, values in plain["history"].items():
        assert submitted["history"][name] == pytest.approx(values, abs=1e-4), name
    assert submitted["weights"] == pytest.approx(plain["weights"], rel=1e-4)
    assert submitted["logs"]


@pytest.mark.feature(
    "`EarlyStopping`, `ReduceLROnPlateau`, `LearningRateScheduler`, `TerminateOnNaN`", area="Detached jobs"
)
def test_callbacks_of_a_submitted_job_decide_as_in_plain_fit(run_script, tmp_path):
    with running(tmp_path) as cluster:
        script = FIT + SUBMIT.format(step_ms=0) + "print(json.dumps([fit(), fetched(handle)]))"
        assert_same(*answer(run_script(script, **cluster.env())))


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.feature("The state of callbacks outlives a server that is killed", area="Detached jobs")
def test_callbacks_go_on_after_their_server_was_killed(run_script, tmp_path):
    with running(tmp_path) as cluster:
        script = FIT + SUBMIT.format(step_ms=60) + "print(json.dumps([fit(), handle.job_id]))"
        plain, job = answer(run_script(script, **cluster.env()))
        handle = attach(job, cluster.address, token_file=str(cluster.token_file))
        assert any(event.kind == "epoch_begin" and event.data["epoch"] == 3 for event in handle.events())
        handle.close()
        cluster.process.send_signal(signal.SIGKILL)
    with running(tmp_path) as cluster:
        script = FIT + f"print(json.dumps(fetched(nfdt.attach({job!r}))))"
        assert_same(plain, answer(run_script(script, **cluster.env())))
