"""The launcher's side of the fork server; the other side is :mod:`nfdt.launch.fork_server`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nfdt.launch.fork_server import READY

SLOT_MODULE = "nfdt.worker.slot"
COMMAND = (sys.executable, "-P", "-m", "nfdt.launch.fork_server", SLOT_MODULE)
FORK_SERVER_END_S = 5.0  # time to end after SIGTERM
NOT_FORKED = 1


class ForkedSlot:
    """Slot process that is a child of the fork server, with the part of ``subprocess.Popen`` that a launcher uses.

    For one thread at a time.

    Attributes:
        pid: Identifier of the process; None until it exists.
        stdin: Other end of its standard input.
        returncode: Exit code as in Popen; None while it runs. -SIGKILL for slots that ended with their fork server,
            ``NOT_FORKED`` for those that it never forked.
    """

    def __init__(self, report: socket.socket, stdin: int) -> None:
        self.pid: int | None = None
        self.stdin = os.fdopen(stdin, "wb", 0)
        self.returncode: int | None = None
        self._report = report

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs or is yet to be forked."""
        with contextlib.suppress(BlockingIOError):
            while self.returncode is None:
                self._take(self._report.recv(64, socket.MSG_DONTWAIT))
        return self.returncode

    def _take(self, message: bytes) -> None:
        if not message:
            self._close(NOT_FORKED if self.pid is None else -signal.SIGKILL)
        elif self.pid is not None:
            self._close(int(message))
        else:
            self.pid = int(message) or None
            if self.pid is None:
                self._close(NOT_FORKED)

    def _close(self, returncode: int) -> None:
        self.returncode = returncode
        self._report.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process runs for longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("nfdt.worker.slot", timeout or 0.0)
            reports = select.poll()
            reports.register(self._report, select.POLLIN)
            reports.poll(None if left is None else left * 1000)
        return code

    def terminate(self) -> None:
        """Send SIGTERM; a process that is yet to be forked counts as ended."""
        if self.poll() is None:
            if self.pid is None:
                self._close(-signal.SIGTERM)
            else:
                with contextlib.suppress(ProcessLookupError):  # it ended with its fork server just now
                    os.kill(self.pid, signal.SIGTERM)


class ForkServerClient:
    """Client that starts the fork server, which ends with this process, and sends it requests.

    Args:
        environment: Environment of the fork server, and of its slots apart from each request's changes; no secrets.
        log: File for its standard output and standard error.
        command: Command line; tests give another one.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, *, command: Sequence[str] = COMMAND) -> None:
        self.log = log
        self._ready = False
        # OpenBLAS would start threads when it is imported. Slots do not need them: they compute with TensorFlow.
        self._environment = {"OPENBLAS_NUM_THREADS": "1", **environment}
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process identifier of the fork server."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether the fork server has ever been able to fork."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._requests.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._ready

    @property
    def returncode(self) -> int | None:
        """Exit code of the fork server; None while it lives."""
        return self._process.poll()

    def fork(self, arguments: Sequence[str], name: str, environment: Mapping[str, str], log: int) -> ForkedSlot:
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
        slot = ForkedSlot(report, stdin)
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
        """End the fork server and its remaining slots: close its input and terminate it, kill it after a deadline."""
        self._requests.close()
        self._process.terminate()
        try:
            self._process.wait(FORK_SERVER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
