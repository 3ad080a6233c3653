"""``nfdt start`` and ``nfdt stop``: a warm server, which has imported Keras before the first script runs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from nfdt.core.errors import JobFailed, UsageError
from nfdt.core.host.keras_backend import TENSORFLOW, current_backend
from nfdt.core.host.machine import process_lives
from nfdt.core.host.packages import require_server_packages
from nfdt.core.host.private_files import ensure_folder, private
from nfdt.core.host.warm import check_private, connect, description_file, read_warm_server, warm_folder

START_S = 180.0  # time to import Keras on a machine that is busy
END_S = 30.0
POLL_S = 0.05
COMMAND = (sys.executable, "-P", "-m", "nfdt.launch.warm_server")


@click.command()
def start() -> None:
    """Keep a warm server on this machine: scripts that start a server of their own begin to train sooner.

    It has imported Keras and TensorFlow, and starts the job server and the workers of each run within a moment.
    nfdt run and distribute find it by themselves. It serves this user only. End it with nfdt stop.
    """
    require_server_packages("nfdt start")
    if (backend := current_backend()).name != TENSORFLOW:
        raise UsageError(
            f"nfdt start: expected Keras on {TENSORFLOW!r}, because other backends cannot be forked. Received: "
            f"{backend.name!r} ({backend.origin})."
        )
    folder = ensure_folder(warm_folder(), "nfdt start")
    folder.chmod(0o700)
    server = read_warm_server(folder)
    if server is not None and (connection := connect(folder)) is not None:
        connection.close()
        click.echo(f"A warm server runs already: process {server.pid}, log in {server.log}", err=True)
        return
    log = folder / "warm.log"
    with open(log, "w", opener=private) as errors:
        check_private(log)
        process = subprocess.Popen(
            [*COMMAND, str(folder), str(log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={"OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ},  # no threads before forks
        )
    click.echo(f"A warm server starts: process {process.pid}, log in {log}", err=True)
    if _await_answer(process, log).get("runs"):
        click.echo("Another command has started one meanwhile.", err=True)


def _await_answer(process: subprocess.Popen[bytes], log: Path) -> dict[str, object]:
    """Return what the process prints when it serves.

    Raises:
        JobFailed: it ended, or has not answered in time and is ended.
    """
    assert process.stdout is not None
    answers = select.poll()
    answers.register(process.stdout, select.POLLIN)
    with process.stdout:
        answer = process.stdout.readline() if answers.poll(START_S * 1000) else b""
    if not answer:
        process.kill()
        process.wait()
        lines = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise JobFailed("\n".join([f"nfdt start: the warm server did not start. The end of {log}:", *lines]))
    return dict(json.loads(answer))


@click.command()
def stop() -> None:
    """End the warm server of nfdt start, with the runs that use it."""
    folder = warm_folder()
    server = read_warm_server(folder)
    connection = connect(folder) if server is not None else None
    if server is None or connection is None:
        description_file(folder).unlink(missing_ok=True)
        click.echo("No warm server runs.", err=True)
        return
    connection.close()
    os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while process_lives(server.pid):
        if time.monotonic() >= deadline:
            os.kill(server.pid, signal.SIGKILL)
            break
        time.sleep(POLL_S)
    click.echo(f"The warm server has ended: process {server.pid}", err=True)
