"""Fixtures that run real scripts on loopback for end-to-end tests."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest

from tests.support.script_fork_server import Finished, ScriptForkServer
from tests.support.scripts import DEADLINE_S, environment


@pytest.fixture(scope="session")
def script_fork_server(tmp_path_factory):
    server = ScriptForkServer(tmp_path_factory.mktemp("scripts"))
    yield server
    server.stop()


@pytest.fixture
def run_script(tmp_path, script_fork_server):
    """Write a script and run it to its end, as a user would; ``command``: a launcher other than Python.

    A local cluster of the script uses the warm server. ``NFDT_WARM="false"``: it starts processes of its own.
    """

    def run(source: str, *arguments: str, command: Sequence[str] = (), **env: str) -> Finished:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        if not command:
            return script_fork_server.run(script, *arguments, **env)
        done = subprocess.run(
            [*command, str(script), *arguments],
            cwd=tmp_path,
            env=environment(**{"NFDT_WARM": "true", **env}),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def start_script(tmp_path):
    """Write a script and start it; it is killed at the end of the test."""
    started = []

    def start(source: str, *arguments: str, **env: str) -> subprocess.Popen:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdout=pipe, stderr=pipe, text=True, env=environment(**env)
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
