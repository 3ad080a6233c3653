"""Keras' callbacks of a detached job, on a real server: they decide as in plain ``fit``."""

from __future__ import annotations

import pytest

from tests.support.scripts import DIGITS, answer, start_server, start_workers, stop

PLAIN_AND_SUBMITTED = """
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
    return model, history

def weights_of(model):
    return [float(np.abs(weight).sum()) for weight in model.get_weights()]

model, plain = fit()
handle = nfdt.submit(fit, workers=1, algorithm="bsp")
result = handle.result(timeout_s=100)
other = build()
result.apply_to(other)
print(json.dumps(dict(
    plain=plain.history, submitted=result.history, plain_weights=weights_of(model), weights=weights_of(other),
    logs=[line for line in handle.logs() if "ReduceLROnPlateau" in line], state=handle.status().state,
)))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = start_server(tmp_path_factory.mktemp("cluster"), "--allow-code")
    workers = start_workers(cluster, 1)
    yield cluster
    stop(workers, cluster.process)


@pytest.mark.feature(
    "`EarlyStopping`, `ReduceLROnPlateau`, `LearningRateScheduler`, `TerminateOnNaN`", area="Detached jobs"
)
def test_callbacks_of_a_submitted_job_decide_as_in_plain_fit(run_script, cluster):
    got = answer(run_script(DIGITS + PLAIN_AND_SUBMITTED, **cluster.env()))
    assert got["state"] == "succeeded"
    assert len(got["plain"]["loss"]) < 9
    assert len(set(got["plain"]["learning_rate"])) > 1
    assert set(got["submitted"]) == set(got["plain"])
    for name, values in got["plain"].items():
        assert got["submitted"][name] == pytest.approx(values, abs=1e-4), name
    assert got["weights"] == pytest.approx(got["plain_weights"], rel=1e-4)
    assert got["logs"]
