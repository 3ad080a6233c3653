"""Running a user's file in this process, and what its end means."""

from __future__ import annotations

import sys
import textwrap

import pytest

from nfdt.cli.script import describe_failure, exit_code_of, run_script
from nfdt.core.errors import JobCancelled, NfdtError, ServerUnreachable, UsageError, WorkerFailed


@pytest.fixture
def write(tmp_path):
    def script(source: str):
        path = tmp_path / "user_script.py"
        path.write_text(textwrap.dedent(source))
        return path

    return script


def failure_of(script) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - SystemExit and KeyboardInterrupt count
        run_script(script, [])
    return caught.value


def test_the_script_sees_its_own_arguments_and_directory(write, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = write("import sys, beside; print(__name__, sys.argv, sys.path[0], beside.WORD)")
    run_script(script, ["--epochs", "3"])
    assert capsys.readouterr().out.strip() == f"__main__ [{str(script)!r}, '--epochs', '3'] {tmp_path} found"


def test_arguments_and_path_are_put_back_also_when_the_script_raises(write):
    before = (list(sys.argv), list(sys.path))
    failure_of(write("raise ValueError('x')"))
    assert (sys.argv, sys.path) == before


def test_a_class_of_the_script_belongs_to_main(write, capsys):
    run_script(write("class A: pass\nimport sys; print(sys.modules['__main__'].A is A)"), [])
    assert capsys.readouterr().out.strip() == "True"


@pytest.mark.parametrize(("code", "expected"), [("7", 7), ("", 0), ("None", 0), ("'text'", 1), ("0", 0)])
def test_the_script_s_own_exit_code_passes_through(write, code, expected):
    assert exit_code_of(failure_of(write(f"import sys; sys.exit({code})"))) == expected


def _caused_by(cause: NfdtError) -> Exception:
    error = KeyError("k")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("mine"), 1),
        (KeyboardInterrupt(), 130),
        (UsageError("u"), 2),
        (ServerUnreachable("s"), 4),
        (JobCancelled("c"), 6),
        (_caused_by(WorkerFailed("worker-1 failed")), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_the_kind_of_failure_decides_the_exit_code(error, expected):
    assert exit_code_of(error) == expected


def test_the_traceback_begins_in_the_script(write):
    script = write("def f():\n    raise ValueError('mine')\nf()")
    text = describe_failure(failure_of(script), script)
    assert "runpy" not in text
    assert text.splitlines()[1].strip() == f'File "{script}", line 3, in <module>'
    assert text.splitlines()[-1] == "ValueError: mine"


def test_an_error_before_the_script_began_is_one_message(tmp_path):
    assert describe_failure(UsageError("bad option"), tmp_path / "script.py") == "Error: bad option"


def test_a_syntax_error_names_the_line(write):
    script = write("x = (")
    assert "line 1" in describe_failure(failure_of(script), script)
