"""Output and actions of the installer where nothing has to be built."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "install-horovod"
DEADLINE_S = 60


def install(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_python_without_tensorflow_gets_the_command_that_installs_it(tmp_path):
    venv.create(tmp_path, symlinks=True)
    done = install(tmp_path / "bin" / "python")
    assert done.returncode == 1
    assert "pip install tensorflow-cpu" in done.stderr


def test_a_python_that_is_not_there_is_named(tmp_path):
    done = install(tmp_path / "python")
    assert done.returncode == 1
    assert str(tmp_path / "python") in done.stderr


@pytest.mark.skipif(not (Path(sys.prefix) / ".nfdt-horovod").exists(), reason="not installed by the script")
def test_what_is_installed_is_left_alone():
    done = install(sys.executable)
    assert (done.returncode, done.stdout) == (0, "")
