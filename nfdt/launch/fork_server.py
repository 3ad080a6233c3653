"""Fork server: a process that imports the modules of slots once, then forks a slot for each request.

:class:`nfdt.launch.fork_client.ForkServerClient` starts it as ``python -m nfdt.launch.fork_server MODULE``.
Its standard input is the socket that carries the requests.
The process must have one thread whenever it forks, so neither TensorFlow's runtime nor gRPC is started here.
It never receives a job, and ends with its launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import random
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from nfdt.core.host.child_process import die_with_parent
from nfdt.core.host.startup import note_start

_log = logging.getLogger(__name__)

READY = b"ready"
REQUEST_BYTES = 2**20
DESCRIPTORS = 3  # in a request: the slot's standard input, its log, and the socket that reports on it
_PR_SET_NAME = 15


class ForkedChildren:
    """Children of this process; sets its handler of SIGCHLD and its wake-up descriptor.

    A child that has ended stays a zombie until its client, which has read the exit code, closes its end of the
    child's connection: until then no other process gets its process id.

    Attributes:
        selector: Selector whose keys have a function as data, which handles what has arrived. Signals wake it.
    """

    def __init__(self) -> None:
        self._living: dict[int, socket.socket] = {}
        self._woken, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the default would not wake the selector
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._woken, selectors.EVENT_READ, self.report_ends)

    @property
    def living(self) -> list[int]:
        """Process ids of the children whose ends have not been reported."""
        return list(self._living)

    def add(self, pid: int, connection: socket.socket) -> None:
        """Add a child, and report its process id over ``connection``."""
        self._living[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._reap(pid, connection))
        send_number(connection, pid)

    def report_ends(self) -> None:
        """Report the exit codes of the children that have ended, negative for a signal."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096, socket.MSG_DONTWAIT)
        for pid, connection in list(self._living.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del self._living[pid]
                send_number(connection, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def _reap(self, pid: int, connection: socket.socket) -> None:
        """Reap a child whose client has closed its end of ``connection``; kill it if it still runs."""
        _log.info("process %d has ended", pid)
        self.selector.unregister(connection)
        if self._living.pop(pid, None) is not None:
            os.kill(pid, signal.SIGKILL)
        connection.close()
        os.waitpid(pid, 0)

    def close(self) -> None:
        """Close all sockets and restore the handling of signals, in a new child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sockets: list[Any] = [self._alarm, *(key.fileobj for key in self.selector.get_map().values())]
        self.selector.close()
        for one in sockets:
            one.close()


def send_number(connection: socket.socket, number: int) -> None:
    """Report a process id or an exit code."""
    with contextlib.suppress(OSError):  # the client has closed its end, which the selector reports later
        connection.send(str(number).encode())


class ForkServer:
    """Server that forks slots and reports each over its own socket: process id (0: not forked), then exit code.

    Args:
        requests: Socket of the launcher's requests.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children = ForkedChildren()
        # A scheduler may send SIGTERM to every process: the slots end with the fork server, so it ends after them.
        self._on_sigterm = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._children.selector.register(requests, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Fork until the launcher closes its end; return None then, and in each slot its arguments.

        Raises:
            RuntimeError: There are other threads, which a fork would interrupt in the middle of their work.
        """
        _require_one_thread()
        self._requests.send(READY)
        while True:
            for key, _ in self._children.selector.select():
                if key.fileobj is not self._requests:
                    key.data()
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, DESCRIPTORS)
                if not message:
                    return None
                if self._fork(*descriptors):
                    return _become_slot(json.loads(message))

    def _fork(self, stdin: int, log: int, report: int) -> bool:
        """Fork a slot; return True in the slot, whose standard input and output are set."""
        connection = socket.socket(fileno=report)
        sys.stdout.flush()
        _require_one_thread()
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the slot takes it once it no longer ignores it
        try:
            pid = os.fork()
        except OSError as error:
            print(f"fork server: cannot fork: {error}", file=sys.stderr, flush=True)
            pid = -1
        if pid == 0:
            self._leave(parent, stdin, log)
            connection.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(stdin)
        os.close(log)
        if pid < 0:
            send_number(connection, 0)
            connection.close()
        else:
            self._children.add(pid, connection)
        return False

    def _leave(self, parent: int, stdin: int, log: int) -> None:
        """Make the new slot end with the fork server, and close the server's sockets in it."""
        lead_session(parent)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._children.close()
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(stdin)
        os.close(log)


def lead_session(parent: int) -> None:
    """Make a process that ``parent`` has just forked lead a session of its own, and end with its parent."""
    os.setsid()
    die_with_parent(watch_stdin=False)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before die_with_parent took effect


def other_threads() -> list[str]:
    """Return the names of the threads of this process except this one, with those that no Python code has started."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != threading.get_native_id():
            with contextlib.suppress(OSError):  # it has ended
                found.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return found


def _require_one_thread() -> None:
    if others := other_threads():
        raise RuntimeError(
            f"Fork server: expected one thread before a fork. Received others: {', '.join(others)}; something that was "
            "imported starts threads. Slots are started without a fork server now."
        )


def _become_slot(request: dict[str, Any]) -> list[str]:
    """Set environment, name and random seeds of the new process."""
    import numpy as np

    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv[1:] = request["arguments"]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request["title"].encode())  # the first 15 bytes, for ps and top
    random.seed()
    np.random.seed()
    return list(request["arguments"])


def main() -> int:
    """Import the module that the command line names, then fork on request; each fork runs its ``main``."""
    die_with_parent(watch_stdin=False)
    note_start("fork server", "runs")
    slot = importlib.import_module(sys.argv[1])
    slot.load()
    note_start("fork server", "has imported")
    arguments = ForkServer(socket.socket(fileno=os.dup(0))).serve()
    return 0 if arguments is None else slot.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
