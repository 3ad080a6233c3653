"""Starts a job server as a child process on loopback, which ends with its session."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nfdt.core.errors import ServerUnreachable
from nfdt.core.host.child_process import ForkedProcess
from nfdt.core.host.keras_backend import TENSORFLOW, VARIABLE, current_backend
from nfdt.core.host.packages import require_page_packages, require_server_packages
from nfdt.core.host.private_files import make_folder, private, sweep
from nfdt.core.host.startup import note_start
from nfdt.core.host.warm import find_warm_server, start_warm, warm_folder
from nfdt_client import ring
from nfdt_client.options import Options

logger = logging.getLogger(__name__)

PAGE_ADDRESS = "127.0.0.1:0"
PREFIX = "nfdt-"  # of the folder's name
COMMAND = (sys.executable, "-P", "-m", "nfdt.jobserver.main")  # -P: no file of the user shadows our modules
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 5.0
TAIL_LINES = 20


def server_environment() -> dict[str, str]:
    """Return the environment of a server that this process starts, which is also that of its fork server."""
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, VARIABLE: current_backend().name}


class StartedServer(Protocol):
    """A job server that a session uses, started by the session or by its caller.

    Attributes:
        token: Secret that it accepts.
        ca_file: PEM certificates to trust; None: it talks in plain text.
        is_warm: Whether a warm server has started it.
    """

    token: str
    ca_file: str | None
    is_warm: bool

    def address(self) -> str:
        """Wait until the server serves and return its ``HOST:PORT``."""
        ...

    def check(self) -> None:
        """Raise an error with the reason if the server cannot serve any more."""
        ...


class EmbeddedServer:
    """A job server with its own workers, started in the background and stopped at the end.

    The child reads both tokens from the first line of its standard input, writes its address as one JSON
    line, and ends when its standard input is closed, so also when this process dies.
    The process that ends last removes the folder. If both are killed, the next start removes it.

    Args:
        workers: Number of worker processes to start.
        shards: Number of shard processes to start.
        rings: Horovod jobs (allreduce rings) to start, each as the fields of its ring description.
        network: Arguments of the server that set the listening address; loopback unless given.
        fork_server: Socket to a fork server of slots, which the caller closes after :meth:`start`; None: the server
            starts its own.
        warm: Whether a warm server may start the server, if there is one that this process can use.
        ui: Whether the server serves a page for browsers, on loopback.
        command: Replaces the server's command line; the folder is not passed on then.

    Attributes:
        token: Secret that it accepts from its script.
        worker_token: Secret for slots of other machines, with which they can do nothing else.
        is_warm: Whether a warm server has started it; known after :meth:`start`.
    """

    ca_file: str | None = None

    def __init__(
        self,
        workers: int,
        shards: int,
        *,
        rings: Sequence[Mapping[str, Any]] = (),
        network: Sequence[str] = (),
        fork_server: socket.socket | None = None,
        warm: bool = False,
        ui: bool = False,
        command: list[str] | None = None,
    ) -> None:
        self.token, self.worker_token = secrets.token_hex(32), secrets.token_hex(32)
        self._fork_server = [] if fork_server is None else [fork_server.fileno()]
        self._workers, self._shards, self._rings, self._network = workers, shards, rings, network
        self._command, self._warm, self._ui = command, warm, ui
        self.is_warm = False
        self._directory: Path | None = None
        self._lock = -1
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._output: BinaryIO | None = None
        self._answer = ""
        self._reading = threading.Lock()

    def start(self) -> None:
        """Start the child and return at once; its processes warm up in the background.

        Raises:
            NotInstalled: The packages of a server, or of its page, are missing.
        """
        require_server_packages("A server in this script", current_backend().name)
        if self._ui:
            require_page_packages("The option ui")
        for folder in sweep(PREFIX):
            logger.info("Removed %s, which a killed script and its server left behind.", folder)
        self._directory, self._lock = make_folder(PREFIX)
        output, theirs = os.pipe()
        self._output = os.fdopen(output, "rb")
        try:
            with open(self._log_file, "w", opener=private) as log:
                self._process = self._from_warm_server(theirs, log.fileno()) or self._from_command(theirs, log.fileno())
        finally:
            os.close(theirs)
        note_start("script", "has started the job server")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: address() reports why
            self._process.stdin.write(f"{self.token} {self.worker_token}\n".encode())
            self._process.stdin.flush()

    def _arguments(self, fork_server: Sequence[int] = ()) -> list[str]:
        return [
            *("--embedded", *self._network),
            *("--workers", str(self._workers), "--shards", str(self._shards)),
            *("--state-dir", str(self.folder / "state"), "--folder", str(self.folder)),
            *(part for ring in self._rings for part in ("--ring", json.dumps(ring))),
            *(part for descriptor in fork_server for part in ("--fork-server", str(descriptor))),
            *(("--ui", PAGE_ADDRESS) if self._ui else ()),
        ]

    def _from_warm_server(self, output: int, log: int) -> ForkedProcess | None:
        folder = warm_folder()
        if not self._warm or self._command or find_warm_server(folder) is None:
            return None
        process = start_warm(folder, self._arguments(), server_environment(), output=output, log=log, lock=self._lock)
        self.is_warm = process is not None
        return process

    def _from_command(self, output: int, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command or [*COMMAND, *self._arguments(self._fork_server)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=log,
            env=server_environment(),
            start_new_session=True,  # Ctrl-C reaches the script alone, which stops the server itself
            pass_fds=(self._lock, *self._fork_server),
        )

    def address(self) -> str:
        """Wait until the server serves and return its ``HOST:PORT``.

        Raises:
            ServerUnreachable: it ended or sent nothing within the time limit; the message holds the end of its log.
        """
        with self._reading:
            if not self._answer and not self._read_answer():
                raise ServerUnreachable(self._explain(f"did not start within {START_TIMEOUT_S:.0f} s"))
        try:
            return str(json.loads(self._answer)["address"])
        except (ValueError, KeyError, TypeError):
            raise ServerUnreachable(self._explain("did not start")) from None

    def check(self) -> None:
        """Raise ServerUnreachable if the child has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise ServerUnreachable(self._explain(f"ended with exit code {self._process.returncode}"))

    def stop(self) -> None:
        """Stop the server (close its input, then terminate, then kill) and remove its folder. Safe to call twice."""
        process, self._process = self._process, None
        try:
            if process is not None:
                _end(process)
        finally:
            if self._output is not None:
                self._output.close()
            if self._directory is not None and self._lock >= 0:
                shutil.rmtree(self._directory, ignore_errors=True)
                os.close(self._lock)
                self._lock = -1

    @property
    def folder(self) -> Path:
        """Folder of the server's files, from :meth:`start` on."""
        assert self._directory is not None
        return self._directory

    @property
    def _log_file(self) -> Path:
        return self.folder / "server.log"

    def _read_answer(self) -> bool:
        """Read the child's one line, or its end; return False if neither comes within the time limit."""
        if self._output is None:
            return True
        answers = select.poll()
        answers.register(self._output, select.POLLIN)
        if not answers.poll(START_TIMEOUT_S * 1000):
            return False
        self._answer = self._output.readline().decode()
        return True

    def _explain(self, what: str) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_file.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
            if lines:
                return f"The embedded job server {what}. The end of its log:\n" + "\n".join(lines)
        return f"The embedded job server {what} and left no log."


@contextlib.contextmanager
def embedded_server(options: Options) -> Iterator[StartedServer]:
    """Start a job server with the workers that the options ask for; stop it at the end of the block."""
    cluster, topology = options.cluster, options.algorithm.topology_facts
    if not topology.flat and current_backend().name != TENSORFLOW:  # ranks are worker slots
        server = EmbeddedServer(cluster.workers, 0 if topology.allreduce else cluster.shards, ui=options.ui)
    elif topology.allreduce:
        server = EmbeddedServer(0, 0, rings=[ring.describe_ring(cluster)], ui=options.ui)
    elif topology.grouped:
        rings = ring.describe_groups(options.algorithm, cluster)
        server = EmbeddedServer(0, cluster.shards, rings=rings, ui=options.ui)
    else:
        server = EmbeddedServer(cluster.workers, cluster.shards, warm=options.warm, ui=options.ui)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _end(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """Close the child's input, then terminate it, then kill it, each with a deadline."""
    try:
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.close()
        for insist, timeout_s in ((None, STOP_TIMEOUT_S), (process.terminate, KILL_TIMEOUT_S)):
            if insist is not None:
                insist()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                return
    finally:
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel takes long to free tens of GB
                process.wait(KILL_TIMEOUT_S)
