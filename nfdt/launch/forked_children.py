"""Children that a single-threaded process has forked, whose clients learn of their ends over a socket each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket


class ForkedChildren:
    """Children of this process; sets its handler of SIGCHLD and its wake-up descriptor.

    A child that has ended stays a zombie until :meth:`forget`: until then no other process gets its process id.

    Attributes:
        woken: Socket that becomes readable when a signal arrives; :meth:`report_ends` reads it.
        alarm: Other end of ``woken``.
    """

    def __init__(self) -> None:
        self._living: dict[int, socket.socket] = {}
        self.woken, self.alarm = socket.socketpair()
        self.alarm.setblocking(False)
        signal.set_wakeup_fd(self.alarm.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    @property
    def living(self) -> list[int]:
        """Process ids of the children whose ends have not been reported."""
        return list(self._living)

    def add(self, pid: int, connection: socket.socket) -> None:
        """Add a child, and report its process id over ``connection``."""
        self._living[pid] = connection
        send_number(connection, pid)

    def report_ends(self) -> None:
        """Report the exit codes of the children that have ended, negative for a signal."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096, socket.MSG_DONTWAIT)
        for pid, connection in list(self._living.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del self._living[pid]
                send_number(connection, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def forget(self, pid: int, connection: socket.socket) -> None:
        """Reap a child whose client has closed its end of ``connection``; kill it if it still runs."""
        if self._living.pop(pid, None) is not None:
            os.kill(pid, signal.SIGKILL)
        connection.close()
        os.waitpid(pid, 0)


def send_number(connection: socket.socket, number: int) -> None:
    """Report a process id or an exit code."""
    with contextlib.suppress(OSError):  # the client has closed its end, which the selector reports later
        connection.send(str(number).encode())
