"""Execution of a user's script in this process, and the meaning of its end."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from nfdt.cli import cli, hfdt
from nfdt.cli.script import Script, describe_failure, exit_code_of, run_script
from nfdt.core.errors import JobCancelled, NfdtError, ServerUnreachable, UsageError, WorkerFailed
from tests.support.command_lines import command_of


@pytest.fixture
def write(tmp_path):
    def script(source: str):
        path = tmp_path / "user_script.py"
        path.write_text(textwrap.dedent(source))
        return path

    return script


def failure_of(script) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - SystemExit and KeyboardInterrupt count
        run_script(Script(str(script)))
    return caught.value


def test_the_script_sees_its_own_arguments_and_directory(write, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = write("import sys, beside; print(__name__, sys.argv, sys.path[0], beside.WORD)")
    run_script(Script(str(script), ("--epochs", "3")))
    assert capsys.readouterr().out.strip() == f"__main__ [{str(script)!r}, '--epochs', '3'] {tmp_path} found"


def test_arguments_and_path_are_put_back_also_when_the_script_raises(write):
    before = (list(sys.argv), list(sys.path))
    failure_of(write("raise ValueError('x')"))
    assert (sys.argv, sys.path) == before


def test_a_class_of_the_script_belongs_to_main(write, capsys):
    run_script(Script(str(write("class A: pass\nimport sys; print(sys.modules['__main__'].A is A)"))))
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
    text = describe_failure(failure_of(script))
    assert text.splitlines()[1].strip() == f'File "{script}", line 3, in <module>'
    assert text.splitlines()[-1] == "ValueError: mine"


def test_an_error_before_the_script_began_is_one_message():
    assert describe_failure(UsageError("bad option")) == "Error: bad option"


def test_a_syntax_error_names_the_line(write):
    script = write("x = (")
    text = describe_failure(failure_of(script))
    assert text.splitlines()[0].strip() == f'File "{script}", line 1'
    assert text.splitlines()[-1].startswith("SyntaxError")


PROBE = """
import json, sys
spec = __spec__ and [__spec__.name, __spec__.origin, __spec__.parent]
kinds = [type(__loader__).__name__, type(__builtins__).__name__]
own = vars(sys.modules["__main__"]) is globals()
names = sorted(name for name in globals() if name.startswith("__"))
print(json.dumps([__name__, __file__, __package__, __cached__, spec, kinds, own, names, sys.argv, sys.path[0]]))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Provide the current directory with one script, which several paths lead to."""
    for place in ("train.py", "app/__init__.py", "app/train.py", "app/nested/__main__.py", "space/train.py"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROBE if path.stem != "__init__" else "")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link.py").symlink_to(tmp_path / "app" / "train.py")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("app", "space")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--epochs", "3", "--", "-m"),
        ("./train.py",),
        ("app/train.py",),
        ("links/link.py",),
        ("-m", "train", "--epochs", "3"),
        ("-m", "app.train", "--", "-m", "x"),
        ("-m", "app.nested"),
        ("-mspace.train",),
    ],
    ids=" ".join,
)
def test_a_script_finds_itself_as_python_would_have_started_it(project, capsys, words):
    python = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=True)
    context = command_of(cli, "run").make_context("run", list(words))
    run_script(context.params["script"])
    assert json.loads(capsys.readouterr().out) == json.loads(python.stdout)


@pytest.mark.parametrize("name", ["nowhere", "app.nowhere", "nowhere.train", "app", "train.py"])
def test_a_module_that_is_not_there_is_a_usage_error(project, name):
    with pytest.raises(UsageError, match=f"Received: '{name}'"):
        run_script(Script(name, is_module=True))


def test_what_the_module_s_package_lacks_is_the_script_s_own_failure(project):
    (project / "app" / "__init__.py").write_text("import not_installed")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        run_script(Script("app.train", is_module=True))


COMMANDS = {
    "nfdt run": (command_of(cli, "run"), ["--workers", "2"]),
    "nfdt mpi": (command_of(cli, "mpi"), ["--set", "overlap=1", "--insecure"]),
    "nfdt plan": (command_of(cli, "plan"), ["--workers", "2"]),
    "nfdt simulate": (command_of(cli, "simulate"), ["--cluster", "-m.toml", "--seed=1"]),
    "hfdt run": (command_of(hfdt, "run"), ["-np", "2", "--autotune"]),
}
REST = ("--workers", "7", "-np", "7", "--help", "--", "-m", "x")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("start", [("train.py",), ("-m", "app.train"), ("--", "train.py")], ids=" ".join)
def test_what_follows_the_script_belongs_to_it_in_every_command(project, command, start):
    parser, options = COMMANDS[command]
    context = parser.make_context(command, [*options, *start, *REST])
    assert context.params["script"] == Script(start[1] if len(start) > 1 else start[0], REST, start[0] == "-m")
    assert context.params.get("workers") in (None, "2")
