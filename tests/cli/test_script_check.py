"""Scripts that cannot be compiled: every command reports them before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from nfdt.cli import cli, hfdt
from nfdt.cli.script import Script, check_script
from nfdt.core.errors import UsageError

COMMANDS = {
    "nfdt run": (cli, ["run", "--workers", "2"]),
    "nfdt run --detach": (cli, ["run", "--server", "127.0.0.1:1", "--detach"]),
    "nfdt mpi": (cli, ["mpi"]),
    "nfdt plan": (cli, ["plan", "--workers", "2"]),
    "nfdt simulate": (cli, ["simulate", "--cluster", "cluster.toml"]),
    "nfdt submit": (cli, ["submit", "--slurm"]),
    "hfdt run": (hfdt, ["run", "-np", "2"]),
}
BROKEN = {
    "bracket": "import keras\nx = (1,\nprint('began')\n",
    "indentation": "if True:\nprint('began')\n",
    "statement": "print('began')\nreturn 1\n",
}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Provide a function that writes a script and returns what Python prints about it."""
    monkeypatch.chdir(tmp_path)

    def write(source):
        (tmp_path / "train.py").write_text(source)
        done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        return done.stderr

    return write


def without_marks(message):
    """Return the lines of a message without those of marks, which are longer where Python reads a text, not a file."""
    return [line for line in message.splitlines() if line.strip(" ^")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_what_python_prints_and_ends_as_python_does(broken, name):
    group, arguments = COMMANDS[name]
    printed = broken(BROKEN["bracket"])
    assert "line 2" in printed
    assert "^" in printed
    done = CliRunner().invoke(group, [*arguments, "train.py"])
    assert (done.exit_code, done.stderr, done.stdout) == (1, printed, "")


@pytest.mark.parametrize("fault", BROKEN)
def test_whatever_python_refuses_is_refused_with_its_words(broken, fault):
    printed = broken(BROKEN[fault])
    done = CliRunner().invoke(cli, ["run", "train.py"])
    assert done.exit_code == 1
    assert without_marks(done.stderr) == without_marks(printed)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_that_is_missing_is_a_usage_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    group, arguments = COMMANDS[name]
    done = CliRunner().invoke(group, [*arguments, "nowhere.py"])
    assert done.exit_code == 2
    assert "'nowhere.py' does not exist" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_notebook_is_refused_with_what_to_do_instead(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.ipynb").write_text('{"cells": [], "nbformat": 4}')
    group, arguments = COMMANDS[name]
    done = CliRunner().invoke(group, [*arguments, "train.ipynb"])
    assert done.exit_code == 2
    assert "train.ipynb: expected a Python script. Received: a notebook." in done.output
    assert "jupyter nbconvert --to script train.ipynb" in done.output


def test_modules_are_found_and_compiled_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_that_is_cut_off.py").write_text(BROKEN["bracket"])
    with pytest.raises(SyntaxError):
        check_script(Script("module_that_is_cut_off", is_module=True))
    with pytest.raises(UsageError, match="nowhere"):
        check_script(Script("nowhere", is_module=True))


def test_no_line_of_a_package_runs_while_its_module_is_looked_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app_that_runs").mkdir()
    (tmp_path / "app_that_runs" / "__init__.py").write_text("raise RuntimeError('it ran')")
    before = list(sys.path)
    check_script(Script("app_that_runs.train", is_module=True))
    check_script(Script("app_that_runs", is_module=True))
    assert sys.path == before
