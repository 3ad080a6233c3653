"""The launcher's side of the fork server; the other side is :mod:`nfdt.launch.fork_server`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nfdt.core.host.child_process import NOT_FORKED, ForkedProcess
from nfdt.core.host.private_files import private
from nfdt.launch.fork_server import READY

SLOT_MODULE = "nfdt.worker.slot"
COMMAND = (sys.executable, "-P", "-m", "nfdt.launch.fork_server", SLOT_MODULE)
FORK_SERVER_END_S = 5.0  # time to end after SIGTERM


class ForkServerClient:
    """Client of a fork server, to which it sends requests.

    Args:
        requests: Socket of the requests.
        environment: Environment of the fork server, and of its slots apart from each request's changes; no secrets.
        log: File with its standard output and standard error.
        process: The fork server; None: another process has started it, and it ends with the socket.
    """

    def __init__(
        self,
        requests: socket.socket,
        environment: Mapping[str, str],
        log: Path,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.log = log
        self._requests, self._environment, self._process = requests, dict(environment), process
        self._ready = self._ended = False

    @classmethod
    def start(cls, environment: Mapping[str, str], log: Path, *, command: Sequence[str] = COMMAND) -> ForkServerClient:
        """Start a fork server, which ends with this process.

        Args:
            environment: As for the class.
            log: As for the class.
            command: Command line; tests give another one.

        Raises:
            OSError: The process cannot be started.
        """
        # OpenBLAS would start threads when it is imported. Slots do not need them: they compute with TensorFlow.
        environment = {"OPENBLAS_NUM_THREADS": "1", **environment}
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "ab", opener=private) as output:
            process = subprocess.Popen(
                command, env=environment, stdin=theirs.fileno(), stdout=output, stderr=output, start_new_session=True
            )
        return cls(requests, environment, log, process)

    @property
    def pid(self) -> int | None:
        """Process identifier of the fork server; None if another process has started it."""
        return self._process.pid if self._process is not None else None

    @property
    def ready(self) -> bool:
        """Whether the fork server has ever been able to fork."""
        self._receive()
        return self._ready

    @property
    def returncode(self) -> int | None:
        """Exit code of the fork server, ``NOT_FORKED`` if it is unknown; None while it lives."""
        if self._process is not None:
            return self._process.poll()
        self._receive()
        return NOT_FORKED if self._ended else None

    def _receive(self) -> None:
        """Read whether the fork server has reported that it is ready, or has closed its end."""
        with contextlib.suppress(BlockingIOError):
            while not self._ended:
                try:
                    message = self._requests.recv(len(READY), socket.MSG_DONTWAIT)
                except ConnectionError:
                    message = b""
                self._ready, self._ended = self._ready or message == READY, not message

    def fork(self, arguments: Sequence[str], name: str, environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Request a slot and return at once, even while the fork server is still importing.

        Args:
            arguments: Arguments of ``nfdt.worker.slot``.
            name: Name of the process in ps and top, which show 15 bytes.
            environment: Whole environment of the slot.
            log: Descriptor for its standard output and standard error; still owned by the caller.

        Raises:
            OSError: The fork server is gone, or the request is too large for a socket.
        """
        names = {*self._environment, *environment}
        changes = {n: environment.get(n) for n in names if environment.get(n) != self._environment.get(n)}
        request = {"arguments": list(arguments), "title": name, "environment": changes}
        report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        their_stdin, stdin = os.pipe()
        slot = ForkedProcess(report, stdin, SLOT_MODULE)
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [their_stdin, log, theirs.fileno()])
        except OSError:
            slot.terminate()
            slot.stdin.close()
            raise
        finally:
            os.close(their_stdin)
            theirs.close()
        return slot

    def stop(self) -> None:
        """End the fork server and its remaining slots: close its input and terminate it, kill it after a deadline.

        One that another process has started ends by itself when its input is closed.
        """
        self._requests.close()
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(FORK_SERVER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
