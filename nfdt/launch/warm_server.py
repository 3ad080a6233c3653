"""The warm server: a process that has imported Keras, and forks a job server with its own slots for each run.

``nfdt start`` starts it as ``python -m nfdt.launch.warm_server FOLDER LOG``; :mod:`nfdt.core.host.warm` finds it.
It computes nothing itself and has one thread, as :mod:`nfdt.launch.fork_server` has.
Each job server has environment, working directory and module search path of its client, and ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from nfdt.core.host.logs import log_to_stderr
from nfdt.core.host.private_files import replacing
from nfdt.core.host.warm import (
    DESCRIPTORS,
    REQUEST_BYTES,
    WarmServer,
    describe,
    description_file,
    importable,
    socket_name,
)
from nfdt.launch.fork_here import FORK_SERVER_LOG, end_forked, fork_server_here, import_slots, keep_descriptors
from nfdt.launch.fork_server import ForkedChildren, lead_session, other_threads

_log = logging.getLogger(__name__)

JOB_SERVER_MODULE = "nfdt.jobserver.main"
END_S = 10.0  # time for the job servers to end after SIGTERM
POLL_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the peer


class WarmServerProcess:
    """The warm server's loop: forks a job server for each connection, and reports its process id and exit code there.

    Args:
        listener: Socket of the requests.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._ending = False
        self._children = ForkedChildren()
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._selector = self._children.selector
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _on_sigterm(self, *_: object) -> None:
        self._ending = True

    def serve(self) -> None:
        """Serve until SIGTERM, then end the job servers."""
        while not self._ending:
            for key, _ in self._selector.select():
                key.data()
        self._listener.close()
        for pid in self._children.living:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while self._children.living and time.monotonic() < deadline:
            self._selector.select(POLL_S)
            self._children.report_ends()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _, user, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user not in (os.geteuid(), 0):
            _log.warning("a process of user %d was refused", user)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(connection))

    def _receive(self, connection: socket.socket) -> None:
        """Fork a job server as a client requests it; close the connection of a client that asks for nothing."""
        self._selector.unregister(connection)
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, DESCRIPTORS)
        except ConnectionError:
            message, descriptors = b"", []
        try:
            if len(descriptors) == DESCRIPTORS:
                self._fork(connection, json.loads(message), descriptors)
                return
        except (ValueError, OSError) as error:
            _log.warning("a request failed: %s", error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.close()

    def _fork(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        if others := other_threads():
            raise OSError(f"expected one thread before a fork. Received others: {', '.join(others)}")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_forked(lambda: _become_job_server(parent, request, descriptors))
        _log.info("job server %d is forked", pid)
        self._children.add(pid, connection)


def _become_job_server(parent: int, request: dict[str, Any], descriptors: list[int]) -> int:
    """Serve one run in the new process, with the fork server of its slots, and return the exit code."""
    lead_session(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    stdin, output, log, lock = descriptors
    keep_descriptors({lock}, stdin, output, log)
    logging.getLogger().handlers.clear()
    os.chdir(request["directory"])
    _search_as(request["environment"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = request["arguments"]
    folder = Path(arguments[arguments.index("--folder") + 1])
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    await_fork_server = fork_server_here(theirs, request["environment"], folder / FORK_SERVER_LOG)
    requests.set_inheritable(False)
    sys.argv = [JOB_SERVER_MODULE, *arguments]
    code = int(importlib.import_module(JOB_SERVER_MODULE).main([*arguments, "--fork-server", str(requests.detach())]))
    if await_fork_server is not None:
        await_fork_server()
    return code


def _search_as(environment: dict[str, str]) -> None:
    """Search modules in the client's PYTHONPATH in place of this process's."""
    ours, theirs = (
        [os.path.abspath(entry) for entry in each.get("PYTHONPATH", "").split(os.pathsep) if entry]
        for each in (os.environ, environment)
    )
    sys.path[:] = [*theirs, *(entry for entry in sys.path if entry not in ours)]
    importlib.invalidate_caches()


def main() -> int:
    """Run ``python -m nfdt.launch.warm_server FOLDER LOG``, which prints one JSON line when it serves, or why not."""
    folder, log = Path(sys.argv[1]), sys.argv[2]
    log_to_stderr("info")
    # One warm server for each user and machine: the lock ends with its process, however that ends.
    lock = os.open(folder / f"warm-{socket.gethostname()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(json.dumps({"runs": True}), flush=True)
        return 1
    imported = importable()
    importlib.import_module(JOB_SERVER_MODULE)
    import_slots(serves_scripts=False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o077)  # which gives the socket its mode: no other user may connect
    with socket_name(folder) as name:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        listener.bind(name)
    os.umask(before)
    listener.listen(64)
    server = WarmServerProcess(listener)
    with replacing(description_file(folder)) as file:
        file.write(describe(WarmServer(os.getpid(), log, imported)))
    print(json.dumps({"pid": os.getpid()}), flush=True)
    null = os.open(os.devnull, os.O_RDWR)  # nfdt start, which has read the line, closes the pipe
    os.dup2(null, 1)
    os.close(null)
    _log.info("warm server runs: process %d", os.getpid())
    try:
        server.serve()
    finally:
        description_file(folder).unlink(missing_ok=True)
    _log.info("warm server ends")
    return 0


if __name__ == "__main__":
    sys.exit(main())
