"""Fits that train in the script's process: reported, and only where the option ``fallback`` allows it."""

from __future__ import annotations

import contextvars
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from nfdt_client import decorator
from nfdt_client.local_fit import HINT

from nfdt.cli import cli
from nfdt.core.errors import CaptureError, JobCancelled, PolicyRefused, ServerUnreachable, UsageError
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
LINE = "This model.fit trains in this process, not on the cluster: "


def own_loss(y, p):
    return keras.ops.mean((y - p) ** 2, axis=-1)


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def open_session(fake):
    return lambda **options: decorator.session(**{"server": fake.address, "token": TOKEN, **options})


@pytest.fixture
def lines(caplog):
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith(LINE)]


class Inner(keras.callbacks.Callback):
    """Callback that fits a model of its own after each epoch."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.records = inner, []

    def on_epoch_end(self, epoch, logs=None):
        self.records.append(self.inner.fit(X, Y, verbose=0).nfdt)


class Hooks(keras.callbacks.Callback):
    """Callback that records the hooks of training."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if name.startswith("on_") and "train" in name or name.startswith("on_epoch"):
            return lambda *arguments, **_: self.calls.append((name, *(a for a in arguments if isinstance(a, int))))
        return super().__getattribute__(name)


def test_a_fit_on_the_cluster_says_so(open_session, fake, model, lines):
    with open_session():
        record = model.fit(X, Y, verbose=0).nfdt
    assert (record["where"], record.where, record["reason"]) == ("cluster", "cluster", "")
    assert set(record) == {"worker-0"}
    with pytest.raises(KeyError):
        record["worker-7"]
    assert lines() == []


def test_a_fit_inside_a_callback_is_keras_own_and_reported(open_session, fake, model, lines):
    callback = Inner(keras.models.clone_model(model))
    callback.inner.compile("sgd", "mse")
    with open_session():
        model.fit(X, Y, verbose=0, callbacks=[callback])
    (record,) = callback.records
    assert len(fake.jobs.jobs) == 1
    assert record["where"] == "local"
    assert "callback" in record["reason"]
    assert lines() == [LINE + record["reason"]]


def test_a_fit_in_another_thread_is_keras_own_and_reported(open_session, fake, model, lines):
    done = []
    with open_session():
        thread = threading.Thread(target=lambda: done.append(model.fit(X, Y, verbose=0).nfdt))
        thread.start()
        thread.join()
    assert done[0]["where"] == "local"
    assert fake.jobs.jobs == {}
    assert "another thread" in lines()[0]


def test_a_thread_with_the_session_s_context_trains_on_the_cluster(open_session, fake, model):
    done = []
    with open_session():
        work = contextvars.copy_context().run
        thread = threading.Thread(target=work, args=(lambda: done.append(model.fit(X, Y, verbose=0).nfdt),))
        thread.start()
        thread.join()
    assert done[0]["where"] == "cluster"


def test_no_session_leaves_no_record(model, lines):
    assert not hasattr(model.fit(X, Y, verbose=0), "nfdt")
    assert lines() == []


def test_a_fit_without_epochs_trains_nowhere(open_session, model):
    with open_session():
        assert model.fit(X, Y, epochs=0, verbose=0).nfdt["where"] == "nowhere"


def test_a_refused_fit_is_an_error_that_names_the_option(open_session, fake, model, lines):
    fake.jobs.allow_code = False
    model.compile("sgd", own_loss)
    with open_session(), pytest.raises(PolicyRefused) as caught:
        model.fit(X, Y, verbose=0)
    assert caught.value.__notes__ == [HINT]
    assert lines() == []


@pytest.mark.feature('Fits that the cluster refuses, with `fallback="local"`', area="Launchers and environments")
def test_a_refused_fit_trains_here_where_that_is_allowed(open_session, fake, model, lines):
    fake.jobs.allow_code = False
    model.compile("sgd", own_loss)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    plain.set_weights(model.get_weights())
    plain.compile("sgd", own_loss)
    expected = plain.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    with open_session(fallback="local"):
        history = model.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert history is model.history
    assert history.history == expected.history
    assert history.params == expected.params
    assert history.nfdt["where"] == "local"
    assert history.nfdt["reason"].startswith("PolicyRefused: The job carries code")
    assert lines() == [LINE + history.nfdt["reason"]]
    assert "\n" not in lines()[0]
    assert fake.jobs.jobs == {}


def test_the_callbacks_of_a_refused_fit_see_what_they_see_in_keras(open_session, fake, model):
    fake.jobs.allow_code = False
    model.compile("sgd", own_loss)
    ours, theirs = Hooks(), Hooks()
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[theirs])
    with open_session(fallback="local"):
        model.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[ours])
    assert ours.calls == theirs.calls
    assert ours.calls[0] == ("on_train_begin",)


def test_a_refused_fit_loses_no_batch_of_a_generator(open_session, fake, model):
    fake.jobs.allow_code = False
    model.compile("sgd", own_loss, run_eagerly=True)
    seen = []
    step = model.train_step

    def train_step(data):
        seen.append(int(data[0][0, 0]))
        return step(data)

    model.train_step = train_step
    batches = ((np.full((2, 3), i, "float32"), np.ones((2, 1), "float32")) for i in range(6))
    with open_session(fallback="local"):
        model.fit(batches, steps_per_epoch=3, epochs=2, shuffle=False, verbose=0)
    assert seen == [0, 0, 1, 2, 3, 4, 5], "the step was tried on the first batch, before the refusal"


def test_a_fit_inside_a_callback_of_a_fallback_is_keras_own(open_session, fake, model):
    fake.jobs.allow_code = False
    callback = Inner(keras.models.clone_model(model))
    callback.inner.compile("sgd", "mse")
    model.compile("sgd", own_loss)
    with open_session(fallback="local"):
        model.fit(X, Y, verbose=0, callbacks=[callback])
    assert callback.records[0]["where"] == "local"
    assert fake.jobs.jobs == {}


def test_without_a_server_every_fit_trains_here(open_session, model, lines):
    with open_session(server="127.0.0.1:1", fallback="local"):
        records = [model.fit(X, Y, verbose=0).nfdt for _ in range(2)]
    assert [record["where"] for record in records] == ["local", "local"]
    assert len(lines()) == 2
    assert "ServerUnreachable" in lines()[0]
    with pytest.raises(ServerUnreachable), open_session(server="127.0.0.1:1"):
        pass


def test_a_model_under_a_strategy_trains_here(open_session, fake):
    tf = pytest.importorskip("tensorflow")
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with open_session(fallback="local"):
        assert model.fit(X, Y, verbose=0).nfdt["reason"].startswith("CaptureError")
    with open_session(), pytest.raises(CaptureError):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    "failure",
    [
        {"state": "failed", "reason": "boom"},
        {"state": "failed", "error": {"module": "builtins", "type": "ValueError", "message": "m", "traceback": "T"}},
        {"state": "cancelled", "reason": "by hand"},
    ],
    ids=["job", "worker", "cancelled"],
)
def test_a_fit_that_has_trained_is_not_trained_again(open_session, fake, model, lines, failure):
    fake.jobs.failure = failure
    with open_session(fallback="local"), pytest.raises(Exception, match="boom|m|by hand"):
        model.fit(X, Y, verbose=0)
    assert lines() == []


@pytest.mark.parametrize("error", [None, {"module": "builtins", "type": "ImportError", "message": "no module"}])
def test_a_job_that_fails_before_it_trains_is_trained_here(open_session, fake, model, error):
    fake.jobs.start_failure = {"state": "failed", "reason": "no module", "error": error}
    with open_session(fallback="local"):
        assert "no module" in model.fit(X, Y, verbose=0).nfdt["reason"]


def test_a_cancelled_job_is_not_trained_here(open_session, fake, model, lines):
    fake.jobs.start_failure = {"state": "cancelled", "reason": "by hand"}
    with open_session(fallback="local"), pytest.raises(JobCancelled):
        model.fit(X, Y, verbose=0)
    assert lines() == []


def test_wrong_arguments_are_keras_own_errors(open_session, model):
    with open_session(fallback="local"), pytest.raises(ValueError, match="sizes"):
        model.fit(X, Y[:3], verbose=0)


def test_a_wrong_value_fails_at_decoration():
    with pytest.raises(UsageError, match="fallback: expected one of error, local. Received: 'keras'"):
        decorator.distribute(fallback="keras")


def test_the_command_line_takes_it(fake, tmp_path, lines):
    fake.jobs.allow_code = False
    script = tmp_path / "train.py"
    script.write_text(
        "import keras, numpy as np\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1))\n"
        "print(model.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0).nfdt['where'])\n"
    )
    words = ["run", "--server", fake.address, "--fallback", "local", str(script)]
    done = CliRunner().invoke(cli, words, env={"NFDT_TOKEN": TOKEN})
    assert (done.exit_code, done.stdout) == (0, "local\n"), done.stderr
    assert len(lines()) == 1
