"""Warning of a session that ends without a fit and so has distributed nothing."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from click.testing import CliRunner
from nfdt_client import decorator

from nfdt.cli import cli
from nfdt.core.errors import UsageError
from tests.support.fake_server import TOKEN

keras = pytest.importorskip("keras")

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
NOTHING_DISTRIBUTED = "No model.fit was called: nothing was distributed."


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def opened(fake):
    return decorator.session(server=fake.address, token=TOKEN)


def times_warned(caplog) -> int:
    return sum(
        NOTHING_DISTRIBUTED in record.getMessage() and record.levelname == "WARNING" for record in caplog.records
    )


def test_a_loop_of_the_script_s_own_is_no_fit(opened, model, caplog):
    with opened:
        model.train_on_batch(X, Y)
    assert times_warned(caplog) == 1


@pytest.mark.parametrize("end", [SystemExit(), SystemExit(0)], ids=repr)
def test_a_script_that_exits_in_order_has_ended(opened, caplog, end):
    with pytest.raises(SystemExit), opened:
        raise end
    assert times_warned(caplog) == 1


@pytest.mark.parametrize("end", [ValueError("mine"), SystemExit(3), SystemExit("text"), KeyboardInterrupt()], ids=repr)
def test_a_script_that_fails_has_another_message(opened, caplog, end):
    with pytest.raises(type(end)), opened:
        raise end
    assert times_warned(caplog) == 0


def test_a_fit_is_enough_also_if_it_fails(opened, model, caplog):
    with opened, contextlib.suppress(ValueError):
        model.fit(X, Y[:3])
    assert times_warned(caplog) == 0


def test_a_fit_of_a_session_inside_is_a_fit(opened, fake, model, caplog):
    @decorator.distribute(server=fake.address, options={"token": TOKEN})
    def main():
        model.fit(X, Y, epochs=1, verbose=0)

    with opened:
        main()
    assert times_warned(caplog) == 0


def test_a_decorated_function_without_a_fit_warns_each_time(fake, caplog):
    function = decorator.distribute(server=fake.address, options={"token": TOKEN})(lambda: 7)
    assert function() == function() == 7
    assert times_warned(caplog) == 2


def test_submit_reports_it_once_as_an_error(fake, caplog):
    with pytest.raises(UsageError, match="returned without"):
        decorator.submit(lambda: None, server=fake.address, options={"token": TOKEN})
    assert times_warned(caplog) == 0


@pytest.mark.parametrize(("ending", "code", "times"), [("", 0, 1), ("sys.exit(0)", 0, 1), ("sys.exit(7)", 7, 0)])
def test_nfdt_run_warns_and_keeps_the_script_s_exit_code(fake, tmp_path, caplog, ending, code, times):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{ending}")
    done = CliRunner().invoke(cli, ["run", "--server", fake.address, str(script)], env={"NFDT_TOKEN": TOKEN})
    assert done.exit_code == code
    assert times_warned(caplog) == times
