"""Tracebacks of a distributed fit: the script's frames and the message, as long as Keras filters its own."""

from __future__ import annotations

import textwrap
import traceback

import numpy as np
import pytest
from click.testing import CliRunner
from nfdt_client import decorator
from nfdt_client.tracebacks import filter_text, hide_frames

from nfdt.cli import cli
from nfdt.core.errors import CaptureError, ServerUnreachable, UsageError, WorkerFailed
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
REMOTE = """Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1, in run
    self._target()
  File "/opt/venv/lib/python3.12/site-packages/nfdt/worker/slot.py", line 150, in _serve
    self._run(assignment, context)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.12/contextlib.py", line 81, in inner
    return func()
  File "/opt/venv/lib/python3.12/site-packages/keras/src/utils/traceback_utils.py", line 122, in error_handler
    raise e.with_traceback(filtered_tb) from None
  File "/home/user/nfdt/train.py", line 7, in train_step
    raise KeyError(find())
  File "/usr/lib/python3.12/json/decoder.py", line 9, in decode
    raise ValueError("x")
KeyError: in user code:

    File "/home/user/nfdt/train.py", line 7, in train_step  *
"""


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def session(fake):
    with decorator.session(server=fake.address, token=TOKEN) as session:
        yield session


@pytest.fixture
def _all_frames():
    keras.config.disable_traceback_filtering()
    yield
    keras.config.enable_traceback_filtering()


def files_of(error: BaseException) -> set[str]:
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def functions_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise LookupError("mine")


def under_a_strategy():
    tf = pytest.importorskip("tensorflow")
    with tf.distribute.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def test_a_refused_fit_shows_the_line_of_the_script_alone(session):
    model = under_a_strategy()

    def script():
        model.fit(X, Y)

    with pytest.raises(CaptureError) as caught:
        script()
    assert files_of(caught.value) == {__file__}
    assert functions_of(caught.value)[-1] == "script"


@pytest.mark.usefixtures("_all_frames")
def test_all_frames_are_shown_where_keras_shows_its_own(session):
    with pytest.raises(CaptureError) as caught:
        under_a_strategy().fit(X, Y)
    assert any("nfdt_client/capture.py" in file for file in files_of(caught.value))


def test_all_frames_are_logged_where_debug_messages_are(session, caplog):
    caplog.set_level("DEBUG", "nfdt_client")
    with pytest.raises(CaptureError):
        under_a_strategy().fit(X, Y)
    assert "nfdt_client/capture.py" in caplog.text


def test_data_of_different_lengths_are_refused_as_by_keras(fake, model):
    def script():
        model.fit(X, Y[:5], verbose=0)

    with pytest.raises(ValueError, match="cardinality") as plain:
        script()
    with decorator.session(server=fake.address, token=TOKEN), pytest.raises(ValueError, match="cardinality") as caught:
        script()
    assert type(caught.value) is type(plain.value)
    assert str(caught.value) == str(plain.value)
    assert caught.value.__cause__ is None
    assert files_of(caught.value) == {__file__}


def test_wrong_arguments_of_fit_show_the_line_of_the_script(session, model):
    with pytest.raises(TypeError) as caught:
        model.fit(X, Y, epoch=3)
    assert files_of(caught.value) == {__file__}


def test_a_callback_that_fails_is_shown_below_the_fit(session, model):
    with pytest.raises(LookupError) as caught:
        model.fit(X, Y, verbose=0, callbacks=[Fails()])
    assert files_of(caught.value) == {__file__}
    assert functions_of(caught.value)[-1] == "on_epoch_end"


def test_an_exception_of_the_data_is_shown_where_it_was_raised(session, model):
    def batches():
        yield X, Y
        yield X, Y
        raise LookupError("disk on fire")

    with pytest.raises(LookupError) as caught:
        model.fit(batches(), verbose=0, shuffle=False)
    assert files_of(caught.value) == {__file__}
    assert functions_of(caught.value)[-1] == "batches"


def test_a_decorated_function_adds_no_frame(fake):
    def raises():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError) as caught:
        decorator.distribute(server=fake.address, options={"token": TOKEN})(raises)()
    assert functions_of(caught.value)[-1:] == ["raises"]
    assert files_of(caught.value) == {__file__}


def enter_a_session():
    with decorator.session(server="127.0.0.1:1", token=TOKEN):
        pass


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: decorator.distribute(wokers=1), UsageError),
        (lambda: decorator.submit(lambda: None), UsageError),
        (enter_a_session, ServerUnreachable),
    ],
    ids=["decoration", "submission", "entrance"],
)
def test_other_public_functions_show_the_line_of_the_script(call, kind):
    with pytest.raises(kind) as caught:
        call()
    assert files_of(caught.value) == {__file__}


def test_causes_show_no_internal_frames_either():
    class Own(Exception):
        pass

    def raises():
        try:
            np.testing.assert_equal(1, 2)
        except AssertionError as error:
            raise Own from error

    with pytest.raises(Own) as caught:
        hide_frames(raises)()
    assert files_of(caught.value) == {__file__}
    assert __file__ in files_of(caught.value.__cause__)
    assert not any("nfdt_client" in file for file in files_of(caught.value.__cause__))


def test_the_traceback_of_a_worker_shows_the_frames_of_the_script():
    shown = filter_text(REMOTE)
    assert "nfdt/worker" not in shown
    assert "contextlib" not in shown
    assert "traceback_utils" not in shown
    assert "threading" not in shown
    assert shown.startswith('Traceback (most recent call last):\n  File "/home/user/nfdt/train.py", line 7')
    assert "json/decoder.py" in shown
    assert shown.endswith(REMOTE[REMOTE.index("KeyError: in user code") :])


def test_of_a_worker_s_traceback_without_frames_of_the_script_the_innermost_stays():
    internal = REMOTE[: REMOTE.index('  File "/home/user')] + "KeyError: 'k'\n"
    raised = REMOTE[
        REMOTE.index('  File "/opt/venv/lib/python3.12/site-packages/keras') : REMOTE.index('  File "/home')
    ]
    assert filter_text(internal) == f"Traceback (most recent call last):\n{raised}KeyError: 'k'\n"
    assert filter_text("KeyError: 'k'\n") == "KeyError: 'k'\n"


def test_frames_of_code_that_a_script_has_sent_show_its_file_and_its_text():
    number = test_frames_of_code_that_a_script_has_sent_show_its_file_and_its_text.__code__.co_firstlineno
    shown = filter_text(f'  File "<{__file__}>", line {number}, in f\n  File "</etc/hostname>", line 1, in g\n')
    name = "def test_frames_of_code_that_a_script_has_sent_show_its_file_and_its_text():"
    assert shown == f'  File "{__file__}", line {number}, in f\n    {name}\n  File "</etc/hostname>", line 1, in g\n'


@pytest.mark.usefixtures("_all_frames")
def test_the_traceback_of_a_worker_is_whole_where_keras_shows_its_frames():
    assert filter_text(REMOTE) == REMOTE


def test_a_worker_s_exception_is_raised_with_the_filtered_traceback(session, fake, model):
    error = {"module": "builtins", "type": "KeyError", "message": "k", "traceback": REMOTE, "worker": "worker-1"}
    fake.jobs.failure = {"state": "failed", "reason": "boom", "error": error}
    with pytest.raises(KeyError) as caught:
        model.fit(X, Y, verbose=0)
    assert isinstance(caught.value.__cause__, WorkerFailed)
    assert "nfdt/worker" not in str(caught.value.__cause__)
    assert files_of(caught.value) == {__file__}


FAILING = """
    import keras, numpy as np
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    {extra}
    model.fit(np.ones((8, 3)), np.ones((8, 2, 5)), verbose=0)
"""


@pytest.mark.parametrize("filtered", [True, False])
def test_the_command_prints_the_line_of_the_script_and_the_message(fake, tmp_path, filtered):
    script = tmp_path / "train.py"
    extra = "" if filtered else "keras.config.disable_traceback_filtering()"
    script.write_text(textwrap.dedent(FAILING.format(extra=extra)))
    variables = {"NFDT_TOKEN": TOKEN}
    try:
        done = CliRunner().invoke(cli, ["run", "--server", fake.address, str(script)], env=variables)
    finally:
        keras.config.enable_traceback_filtering()
    entries = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert done.exit_code == 2, done.stderr
    assert any(f'File "{script}", line 6' in entry for entry in entries)
    assert (len(entries) == 1) == filtered
    assert done.stderr.splitlines()[-1].startswith("nfdt.core.errors.UsageError: Model, loss and training data do not")
