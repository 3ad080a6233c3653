"""Slots that a nursery forks, seen from the launcher; the nursery's own side is :mod:`nfdt.launch.fork_server`."""

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
FORK_SERVER_END_S = 5.0
NOT_FORKED = 1


class ForkedSlot:
    """A slot process that is a child of the nursery; has what a launcher uses of ``subprocess.Popen``.

    For one thread at a time.

    Attributes:
        pid: Of the process; None until it exists.
        stdin: The other end of its standard input.
        returncode: As of Popen; None while it runs. -SIGKILL for slots that ended with their nursery.
    """

    def __init__(self, report: socket.socket, stdin: int) -> None:
        self.pid: int | None = None
        self.stdin = os.fdopen(stdin, "wb", 0)
        self.returncode: int | None = None
        self._report = report

    def poll(self) -> int | None:
        """The exit code, None while it runs or is yet to be forked."""
        with contextlib.suppress(BlockingIOError):
            while self.returncode is None:
                self._take(self._report.recv(64, socket.MSG_DONTWAIT))
        return self.returncode

    def _take(self, said: bytes) -> None:
        if not said:
            self._close(-signal.SIGKILL)
        elif self.pid is not None:
            self._close(int(said))
        else:
            self.pid = int(said) or None
            if self.pid is None:
                self._close(NOT_FORKED)

    def _close(self, returncode: int) -> None:
        self.returncode = returncode
        self._report.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code.

        Raises:
            subprocess.TimeoutExpired: it takes longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("nfdt.worker.slot", timeout or 0.0)
            news = select.poll()
            news.register(self._report, select.POLLIN)
            news.poll(None if left is None else left * 1000)
        return code

    def terminate(self) -> None:
        """Send SIGTERM; one that is yet to be forked has ended by this."""
        if self.poll() is None:
            if self.pid is None:
                self._close(-signal.SIGTERM)
            else:
                with contextlib.suppress(ProcessLookupError):  # it ended with its nursery just now
                    os.kill(self.pid, signal.SIGTERM)


class ForkServerClient:
    """The process that slots are forked from; started here, ends with this process.

    Args:
        environment: Of the nursery and, changed by what each asks for, of its slots; holds no secret.
        log: Gets what the nursery writes to standard output and standard error.
        command: The program; tests give another one.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, *, command: Sequence[str] = COMMAND) -> None:
        self.log = log
        self._ready = False
        # OpenBLAS would start threads when it is imported. Slots multiply with TensorFlow.
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
        """Of the nursery itself."""
        return self._process.pid

    @property
    def ready(self) -> bool:
        """Whether it has ever been able to fork."""
        if not self._ready:
            with contextlib.suppress(OSError):
                self._ready = self._requests.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._ready

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it lives."""
        return self._process.poll()

    def fork(self, arguments: Sequence[str], name: str, environment: Mapping[str, str], log: int) -> ForkedSlot:
        """Ask for a slot; returns at once, also while the nursery is still importing.

        Args:
            arguments: Of ``nfdt.worker.slot``.
            name: Of the process in ps and top, which show 15 bytes.
            environment: All of it.
            log: Descriptor for its standard output and standard error; remains the caller's.

        Raises:
            OSError: the nursery is gone, or the request is too large for a socket.
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
        """End it, and with it whatever slot it still has."""
        self._process.terminate()
        try:
            self._process.wait(FORK_SERVER_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._requests.close()
