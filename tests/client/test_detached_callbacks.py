"""Callbacks of a submitted fit: what goes with the job, and what is refused."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from nfdt_client import decorator

from nfdt.core.errors import CaptureError, UsageError
from nfdt.core.jobs.names import differences, identity_of
from nfdt.model.program.code import load_objects
from nfdt.model.program.manifest import Manifest
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

from nfdt.model.training.epoch_callbacks import SCHEDULE  # noqa: E402

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def compiled(rate=0.5):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def submit(fake, *callbacks, model=None, **fit):
    model = model or compiled()
    return decorator.submit(
        lambda: model.fit(X, Y, epochs=3, verbose=0, callbacks=list(callbacks), **fit),
        server=fake.address,
        token=TOKEN,
        workers=1,
    )


def test_callbacks_go_with_the_job_as_class_and_attributes(fake):
    submit(fake, keras.callbacks.EarlyStopping("loss", patience=4), keras.callbacks.TerminateOnNaN())
    spec = fake.jobs.job.spec
    assert [(one.kind, one.code) for one in spec.callbacks.members] == [
        ("EarlyStopping", None),
        ("TerminateOnNaN", None),
    ]
    state = json.loads(spec.callbacks.state)
    assert state["members"][0]["attributes"]["patience"] == 4
    assert state["learning_rate"] == spec.callbacks.learning_rate == 0.5
    assert not spec.code


def test_a_job_without_callbacks_has_none(fake):
    submit(fake)
    assert fake.jobs.job.spec.callbacks is None


def test_a_schedule_goes_as_code_and_begins_in_the_script(fake):
    factor = 0.25
    model = compiled()
    submit(fake, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * factor), model=model)
    spec = fake.jobs.job.spec
    assert spec.code
    assert spec.callbacks.learning_rate == float(model.optimizer.learning_rate) == 0.125
    (member,) = spec.callbacks.members
    manifest = Manifest.from_bytes(fake.jobs.artifacts[spec.program])
    schedule = load_objects(manifest, member.code, fake.jobs.artifacts.__getitem__, {})[SCHEDULE]
    assert schedule(3, 1.0) == 0.25
    assert "test_a_schedule_goes_as_code" in next(iter(member.sources))


def test_a_schedule_that_cannot_be_pickled_is_refused(fake):
    lock = threading.Lock()
    with pytest.raises(CaptureError, match="'schedule' cannot be sent"):
        submit(fake, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (1 + lock.locked())))


class Own(keras.callbacks.Callback):
    """Callback of a script."""


class Stricter(keras.callbacks.EarlyStopping):
    """Subclass of a script."""


def with_own_hook():
    callback = keras.callbacks.EarlyStopping("loss")
    callback.on_epoch_end = lambda epoch, logs=None: None
    return callback


@pytest.mark.feature(
    "Callbacks of the script, and those that write files",
    area="Detached jobs",
    status="refused",
    note="the remedy depends on the callback",
)
@pytest.mark.parametrize(
    ("make", "needle"),
    [
        (Own, r"Received: Own\. nfdt\.distribute runs every callback"),
        (Stricter, r"Received: Stricter\. nfdt\.distribute"),
        (with_own_hook, r"Received: EarlyStopping with another on_epoch_end\. nfdt\.distribute"),
        (lambda: keras.callbacks.LambdaCallback(), r"LambdaCallback\. nfdt\.distribute"),
        (lambda: keras.callbacks.ModelCheckpoint("x.keras"), r"ModelCheckpoint\. .*handle\.result\(\)"),
        (lambda: keras.callbacks.BackupAndRestore("x"), r"BackupAndRestore\. .*nfdt jobs resume"),
        (lambda: keras.callbacks.CSVLogger("x.csv"), r"CSVLogger\. .*handle\.events\(\)"),
        (lambda: keras.callbacks.TensorBoard("x"), r"TensorBoard\. .*handle\.events\(\)"),
        (lambda: keras.callbacks.History(), r"History\. .*handle\.result\(\)\.history"),
    ],
    ids=lambda value: "" if callable(value) else value.partition("\\")[0],
)
def test_other_callbacks_are_refused_with_the_remedy(fake, make, needle):
    with pytest.raises(UsageError, match=needle) as refused:
        submit(fake, keras.callbacks.EarlyStopping("loss"), make())
    assert "EarlyStopping, LearningRateScheduler, ReduceLROnPlateau, TerminateOnNaN" in str(refused.value)
    assert not fake.jobs.jobs


@pytest.mark.parametrize(
    "callback",
    [keras.callbacks.ReduceLROnPlateau("loss"), keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)],
    ids=lambda value: type(value).__name__,
)
def test_a_rate_that_a_schedule_decides_cannot_be_set(fake, callback):
    model = compiled(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))
    with pytest.raises(UsageError, match="a number as learning rate"):
        submit(fake, callback, model=model)
    submit(fake, keras.callbacks.EarlyStopping("loss"), model=model)
    assert fake.jobs.job.spec.callbacks.learning_rate is None


def test_callbacks_are_part_of_what_a_named_job_is(fake):
    identities = []
    for patience in (1, 1, 2):
        submit(fake, keras.callbacks.EarlyStopping("loss", patience=patience))
        spec = fake.jobs.jobs[f"job-{len(identities)}"].spec
        identities.append(identity_of(spec, Manifest.from_bytes(fake.jobs.artifacts[spec.program])))
    callbacks = [identity["callbacks"] for identity in identities]
    assert callbacks[0] == callbacks[1] != callbacks[2]
    assert "the callbacks" in differences({"callbacks": callbacks[0]}, {"callbacks": callbacks[2]})
