"""Real clusters on loopback for end-to-end tests: one warm server is shared by the tests of a run."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.script_fork_server import Finished, ScriptNursery

ROOT = Path(__file__).parents[2]
NFDT = [sys.executable, "-m", "nfdt.cli"]
DEADLINE_S = 240


def environment(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NFDT_")}
    return {**inherited, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", **extra}


@pytest.fixture(scope="session")
def script_nursery(tmp_path_factory):
    nursery = ScriptNursery(tmp_path_factory.mktemp("scripts"), environment())
    yield nursery
    nursery.stop()


@pytest.fixture
def run_script(tmp_path, script_nursery):
    """Write a script and run it to its end, as a user would; ``command``: by a program other than Python."""

    def run(source: str, *arguments: str, command: Sequence[str] = (), **env: str) -> Finished:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        if not command:
            return script_nursery.run(script, *arguments, environment=environment(**env), timeout_s=DEADLINE_S)
        done = subprocess.run(
            [*command, str(script), *arguments],
            cwd=tmp_path,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def start_script(tmp_path):
    """Write a script and start it; whatever the test finds, it does not outlive the test."""
    started = []

    def start(source: str, **env: str) -> subprocess.Popen:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=pipe, stderr=pipe, text=True, env=environment(**env)
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@dataclass
class Cluster:
    """A server process with its slots."""

    address: str
    token_file: Path
    process: subprocess.Popen
    state_dir: Path

    def env(self) -> dict[str, str]:
        return {"NFDT_SERVER": self.address, "NFDT_TOKEN_FILE": str(self.token_file)}


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def start_server(directory: Path, *options: str) -> Cluster:
    token_file = directory / "token"
    token_file.write_text(secrets.token_hex(16))
    token_file.chmod(0o600)
    process = subprocess.Popen(
        [*NFDT, "server", "--listen", "127.0.0.1:0", "--state-dir", str(directory / "state")]
        + ["--token-file", str(token_file), *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=(directory / "server.log").open("w"),
        text=True,
    )
    line = process.stdout.readline()
    assert ":" in line, (directory / "server.log").read_text()
    return Cluster(line.split()[-1].strip(), token_file, process, directory / "state")


def start_workers(cluster: Cluster, slots: int, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*NFDT, "worker", "--server", cluster.address, "--slots", str(slots), *options],
        env=environment(NFDT_TOKEN_FILE=str(cluster.token_file)),
        stdout=subprocess.DEVNULL,
        stderr=(cluster.state_dir.parent / "worker.log").open("w"),
    )


def stop(*processes: subprocess.Popen) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(30)
