"""Scripts that find their job by its name, with a server that only simulates training."""

from __future__ import annotations

import numpy as np
import pytest
from nfdt_client import decorator
from nfdt_client.connection import JobsClient
from nfdt_client.job import InteractiveJob, job_names
from nfdt_client.options import resolve

from nfdt.core.errors import JobTaken, NotStored, Terminated, UsageError
from nfdt.core.events import MAX_LOGS_BYTES
from tests.support import fake_server
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def compiled(rate=0.5):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def session(fake, **options):
    return decorator.session(server=fake.address, token=TOKEN, options={"job": "digits", **options})


class Killed(Exception):
    """Stands for a signal: the script ends without a word to the server."""


class Hooks(keras.callbacks.Callback):
    """Records the hooks, and ends the script at the end of an epoch as a signal would."""

    def __init__(self, killed_after: int | None = None):
        super().__init__()
        self.calls, self.logs, self.weights, self._killed_after = [], [], [], killed_after

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("begin", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("end", epoch))
        self.logs.append(logs)
        self.weights.append(float(self.model.get_weights()[0][0, 0]))
        if epoch == self._killed_after:
            raise Killed


def undisturbed(epochs):
    return [call for epoch in range(epochs) for call in (("begin", epoch), ("end", epoch))]


def train(fake, *callbacks, epochs=4, model=None, data=(X, Y), **arguments):
    model = model or compiled()
    with session(fake):
        return model.fit(*data, batch_size=2, epochs=epochs, verbose=0, callbacks=list(callbacks), **arguments)


@pytest.fixture
def killed(fake, monkeypatch):
    """Train two epochs of a job with a script that is killed."""

    def run(*callbacks, **arguments):
        with monkeypatch.context() as patched:
            patched.setattr("nfdt_client.job.InteractiveJob.cancel", lambda self, reason: None)
            with pytest.raises(Killed):
                train(fake, *callbacks, Hooks(killed_after=1), **arguments)
        fake.jobs.job.asked.clear()

    return run


def test_the_epochs_so_far_are_replayed_and_the_rest_is_trained(fake, killed, capsys):
    fake.jobs.logs = lambda epoch: {"loss": 1.0 / (epoch + 1)}
    killed()
    hooks = Hooks()
    history = train(fake, hooks)
    assert hooks.calls == undisturbed(4)
    assert history.epoch == [0, 1, 2, 3]
    assert history.history["loss"] == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert [logs["loss"] for logs in hooks.logs] == history.history["loss"]
    np.testing.assert_allclose(np.diff(hooks.weights), [0.0, 1.0, 1.0], atol=1e-5)  # the newest ones while replaying
    asked = [request for request in fake.jobs.job.asked if request[0] != "set_learning_rate"]
    assert asked == [("proceed", 2), ("proceed", 3)]
    assert "Attached to job-0 (digits)" in capsys.readouterr().err


def test_callbacks_with_a_state_reach_the_state_that_they_would_have(fake, killed, tmp_path):
    fake.jobs.logs = lambda epoch: {"loss": 1.0}

    def callbacks():
        return (
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.0),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        )

    killed(*callbacks())
    model = compiled()
    train(fake, *callbacks(), model=model)
    assert float(model.optimizer.learning_rate) == 0.5**4
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 5
    rates = [value for name, value in fake.jobs.job.asked if name == "set_learning_rate"]
    assert rates == [0.25, 0.125], "one rate for all replayed epochs, then each"


def test_files_of_replayed_epochs_are_not_overwritten(fake, killed, tmp_path):
    fake.jobs.logs = lambda epoch: {"loss": [1.0, 0.5, 0.75, 0.25][epoch]}
    path = tmp_path / "best.weights.h5"

    def saver():
        return keras.callbacks.ModelCheckpoint(str(path), "loss", save_best_only=True, save_weights_only=True)

    killed(saver())
    before = path.read_bytes()
    second, seen = saver(), []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(path.read_bytes() == before))
    train(fake, second, look)
    assert seen == [True, True, True, False]
    assert second.best == 0.25


def test_validations_of_the_script_before_are_replayed(fake, killed):
    import tensorflow as tf

    validation = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    first, second = Hooks(), Hooks()
    killed(first, validation_data=validation)
    train(fake, second, validation_data=validation)
    assert [logs["val_loss"] for logs in second.logs[:1]] == [logs["val_loss"] for logs in first.logs[:1]]
    assert all("val_loss" in logs for logs in second.logs)


def test_the_end_of_the_training_in_a_replayed_epoch_ends_the_job(fake, killed):
    fake.jobs.logs = lambda epoch: {"loss": 1.0 + epoch}
    killed()
    history = train(fake, keras.callbacks.EarlyStopping("loss", patience=1), epochs=4)
    assert history.epoch == [0, 1]
    assert ("stop_training", None) in fake.jobs.job.asked


def test_a_job_that_has_succeeded_returns_its_result(fake):
    model, again = compiled(), compiled()
    first = train(fake, Hooks(), model=model)
    asked = list(fake.jobs.job.asked)
    hooks = Hooks()
    second = train(fake, hooks, model=again)
    assert second.history == first.history
    assert hooks.calls == undisturbed(4)
    assert fake.jobs.job.asked == asked
    np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])


def test_a_second_script_does_not_cancel_the_job_of_the_first(fake, killed):
    killed()
    fake.jobs.taken = True
    with pytest.raises(JobTaken):
        train(fake)
    assert fake.jobs.job.asked == []


def test_later_fits_have_numbered_names(fake):
    with session(fake):
        for _ in range(3):
            compiled().fit(X, Y, batch_size=2, epochs=1, verbose=0)
    assert list(fake.jobs.names) == ["digits", "digits-2", "digits-3"]


def test_the_calls_of_a_decorated_function_are_numbered_too(fake):
    @decorator.distribute(server=fake.address, token=TOKEN, job="digits")
    def run():
        compiled().fit(X, Y, batch_size=2, epochs=1, verbose=0)

    run()
    run()
    assert list(fake.jobs.names) == ["digits", "digits-2"]


def test_without_a_name_jobs_have_none():
    assert [name for name, _ in zip(job_names(None), range(2), strict=False)] == ["", ""]


def test_a_name_needs_a_server_that_outlives_the_script():
    with pytest.raises(UsageError, match="expected server="):
        resolve({"job": "digits"}, environ={})
    assert resolve({"job": "digits", "server": "there:1"}, environ={}).job == "digits"
    assert resolve({}, environ={"NFDT_JOB": "digits", "NFDT_SERVER": "there:1"}).settings["job"].value == "digits"
    with pytest.raises(UsageError, match="expected a name"):
        resolve({"job": "a b", "server": "there:1"}, environ={})


class Terminating(keras.callbacks.Callback):
    """Ends the script at the end of the first epoch as a scheduler's signal does."""

    def on_epoch_end(self, epoch, logs=None):
        raise Terminated(143)


def test_a_script_that_a_scheduler_ends_hands_its_job_over(fake):
    with pytest.raises(Terminated) as ended:
        train(fake, Terminating())
    assert ended.value.code == 0
    hooks = Hooks()
    history = train(fake, hooks)
    assert hooks.calls == undisturbed(4)
    assert len(history.history["loss"]) == 4
    assert len(fake.jobs.jobs) == 1


def test_a_script_without_a_name_for_its_job_cancels_it(fake):
    with decorator.session(server=fake.address, token=TOKEN), pytest.raises(Terminated) as ended:
        compiled().fit(X, Y, epochs=4, verbose=0, callbacks=[Terminating()])
    assert ended.value.code == 143


def test_a_script_with_a_name_waits_for_its_server(fake, monkeypatch):
    """The server is started again when the script has found it away, at its beginning and before its fit."""
    wait_ready, started = JobsClient.wait_ready, []

    def start(link, timeout_s):
        if not started or started[-1].stopped:
            started.append(Restarted(fake_server.start(fake.address, fake.jobs)))
        return wait_ready(link, timeout_s)

    monkeypatch.setattr(JobsClient, "wait_ready", start)
    fake.grpc_server.stop(None).wait()
    with session(fake):
        started[-1].stop()
        history = compiled().fit(X, Y, batch_size=2, epochs=2, verbose=0)
    assert history.epoch == [0, 1]
    assert len(started) == 2
    started[-1].stop()


class Restarted:
    def __init__(self, server):
        self._server, self.stopped = server, False

    def stop(self):
        self._server.grpc_server.stop(None).wait()
        self.stopped = True


@pytest.mark.parametrize("method", ["Upload", "Submit"])
def test_a_script_with_a_name_waits_for_room_on_the_disk(fake, method):
    fake.jobs.full = [method, method]
    assert train(fake, epochs=2).epoch == [0, 1]
    assert fake.jobs.full == []


@pytest.mark.parametrize("method", ["Upload", "Submit"])
def test_a_script_without_a_name_does_not_wait_for_room(fake, method):
    fake.jobs.full = [method]
    with decorator.session(server=fake.address, token=TOKEN), pytest.raises(NotStored, match="No room"):
        compiled().fit(X, Y, batch_size=2, epochs=2, verbose=0)


def test_a_disk_that_stays_full_is_the_reason_of_the_end(fake):
    def store():
        raise NotStored("No room.")

    link = JobsClient(fake.address, TOKEN, reconnect_s=0.3)
    with pytest.raises(NotStored, match="No room. Gave up after 0 s"):
        link.persist(store, stores=True)
    link.close()


class RecordingConnection:
    """Connection that keeps the control messages of a job."""

    def __init__(self):
        self.sent = []

    def persist(self, call):
        call()

    def control(self, job_id, **action):
        self.sent.append(action["validated"])


def test_the_numbers_of_a_validation_are_stored_unless_they_are_too_long():
    connection = RecordingConnection()
    job = InteractiveJob(connection, "job", "session", name="mine")
    each_class = {"f1": np.full(10_000, 0.125, "float32")}
    for epoch, logs in enumerate([{"loss": 0.5}, each_class, {"text": "x" * MAX_LOGS_BYTES}]):
        job.validated(epoch, logs)
    assert [message.epoch for message in connection.sent] == [0, 1]
