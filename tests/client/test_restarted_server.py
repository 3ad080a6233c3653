"""Fits whose server is restarted meanwhile, with a server that only simulates training."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from nfdt_client import decorator
from nfdt_client.connection import JobsClient
from nfdt_client.job import InteractiveJob

from nfdt.core.errors import ServerUnreachable
from tests.support import fake_server

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
DEADLINE_S = 120


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


@pytest.fixture
def session(fake):
    with decorator.session(server=fake.address, token=fake_server.TOKEN, batch_hooks="approximate") as session:
        yield session


class Hooks(keras.callbacks.Callback):
    """Records the hooks; sets the learning rate after epoch 0, and ends the training after ``last``."""

    def __init__(self, last: int | None = None):
        super().__init__()
        self.calls, self._last = [], last
        self.weights = []

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(("begin", epoch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("batch", batch))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("end", epoch))
        self.weights.append(float(self.model.get_weights()[0][0, 0]))
        if epoch == 0:
            self.model.optimizer.learning_rate = 0.25
        self.model.stop_training = epoch == self._last


def undisturbed(epochs: int) -> list[tuple[str, int]]:
    """Return the calls of a fit of so many epochs of 4 batches."""
    steps = [[("begin", e), *(("batch", b) for b in range(4)), ("end", e)] for e in range(epochs)]
    return [call for epoch in steps for call in epoch]


def fit(model, hooks, epochs=3):
    return model.fit(X, Y, batch_size=2, epochs=epochs, verbose=0, callbacks=[hooks])


def test_a_broken_epoch_is_seen_once_and_the_requests_are_sent_again(session, fake, model):
    fake.jobs.restart_within = [1]
    before, hooks = float(model.get_weights()[0][0, 0]), Hooks()
    history = fit(model, hooks)
    assert hooks.calls == undisturbed(3)
    assert history.epoch == [0, 1, 2]
    assert len(history.history["loss"]) == 3
    np.testing.assert_allclose(hooks.weights, [before + 1, before + 2, before + 3])
    asked = [request for request in fake.jobs.job.asked if request[0] in ("proceed", "set_learning_rate")]
    rate = ("set_learning_rate", 0.25)
    assert asked == [("proceed", 0), rate, ("proceed", 1), rate, ("proceed", 1), ("proceed", 2)]


def test_an_epoch_whose_state_is_lost_ends_once_it_is_trained_again(session, fake, model):
    fake.jobs.restart_after = {1: 1}
    before, hooks = float(model.get_weights()[0][0, 0]), Hooks()
    history = fit(model, hooks)
    assert hooks.calls == undisturbed(3)
    assert len(history.history["loss"]) == 3
    np.testing.assert_allclose(hooks.weights, [before + 1, before + 2, before + 3])


def test_an_epoch_that_was_seen_to_end_and_is_trained_again_is_not_seen_again(session, fake, model):
    fake.jobs.restart_after = {1: 1}
    losses = iter([3.0, 2.0, 9.0, 1.0])
    fake.jobs.progress = lambda steps: []
    fake.jobs.logs = lambda epoch: {"loss": next(losses)}
    history = model.fit(X, Y, batch_size=2, epochs=3, verbose=0)
    assert history.history == {"loss": [3.0, 2.0, 1.0]}


@pytest.mark.parametrize("resumed", [1, 2])
def test_a_training_that_its_callback_has_ended_ends_at_the_restarted_server(session, fake, model, resumed):
    fake.jobs.restart_after = {1: resumed}
    hooks = Hooks(last=1)
    history = fit(model, hooks, epochs=9)
    assert hooks.calls == undisturbed(2)
    assert history.epoch == [0, 1]


def test_requests_wait_for_a_server_that_is_away(fake, connection):
    fake.jobs.jobs["job-0"] = fake_server.Job(spec=None, state=b"")
    fake.grpc_server.stop(None).wait()
    sent = threading.Thread(target=InteractiveJob(connection, "job-0").set_learning_rate, args=(0.5,))
    sent.start()
    again = fake_server.start(fake.address, fake.jobs)
    sent.join(DEADLINE_S)
    again.grpc_server.stop(None)
    assert fake.jobs.job.asked == [("set_learning_rate", 0.5)]


def test_requests_fail_when_the_server_stays_away(fake):
    link = JobsClient(fake.address, fake_server.TOKEN, reconnect_s=0.3)
    fake.grpc_server.stop(None).wait()
    with pytest.raises(ServerUnreachable, match="Gave up after 0 s"):
        InteractiveJob(link, "job-0").proceed(0)
    link.close()
