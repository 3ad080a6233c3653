"""Commands of an installation without the packages of a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nfdt.core.host.packages import BACKEND_PACKAGES, SERVER_PACKAGES
from tests.support.scripts import DEADLINE_S, environment

WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({list(SERVER_PACKAGES)})); "
COMMAND = WITHOUT + "from nfdt.cli import main; main()"
SESSION = WITHOUT + "import nfdt; nfdt.session(workers=1).__enter__()"


def python(code, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("command", [("server",), ("worker", "--server", "127.0.0.1:1"), ("certs", "--host", "a")])
def test_a_command_of_a_server_names_what_is_missing_and_how_to_install_it(tmp_path, command):
    done = python(COMMAND, *command)
    assert done.returncode == 2, done.stderr
    (message,) = done.stderr.strip().splitlines()
    assert "Missing: cryptography, grpcio-health-checking, numba, psutil" in message
    assert "pip install 'nfdt[server]'" in message


def test_a_server_in_the_script_is_refused_with_the_remedy():
    done = python(SESSION)
    assert "NotInstalled" in done.stderr
    assert "--server HOST:PORT" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("backend", "extra"), [("tensorflow", "cpu"), ("jax", "jax")])
def test_a_bare_installation_names_at_once_all_that_a_script_lacks(backend, extra):
    missing = dict.fromkeys([*SERVER_PACKAGES, *BACKEND_PACKAGES])
    code = f"import sys; sys.modules.update({missing}); import nfdt; nfdt.session(workers=1).__enter__()"
    done = python(code, KERAS_BACKEND=backend)
    (message,) = [line for line in done.stderr.splitlines() if "NotInstalled" in line]
    assert f"Missing: cryptography, grpcio-health-checking, numba, psutil, {BACKEND_PACKAGES[backend]}." in message
    assert f"pip install 'nfdt[{extra}]'" in message


def test_commands_of_a_client_work():
    assert "--detach" in python(COMMAND, "run", "--help").stdout
    done = python(COMMAND, "jobs", "list", "--server", "127.0.0.1:1")
    assert done.returncode == 2, done.stderr
    assert "token" in done.stderr
