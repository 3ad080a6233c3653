"""TCP relay that a test can cut: all connections end, and new ones are refused until it is mended."""

from __future__ import annotations

import contextlib
import socket
import threading

from nfdt.core.wire.channel import split_address


class Relay:
    """Forward all connections on ``address`` to another address."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self._lock = threading.Condition()
        self._open: set[socket.socket] = set()
        self._whole = True
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.refused = 0
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            self._whole = False
            for one in self._open:
                _end(one)

    def mend(self) -> None:
        """Accept connections again."""
        with self._lock:
            self._whole = True

    def until_refused(self, count: int, timeout_s: float) -> bool:
        """Wait until so many connections have been refused since the beginning."""
        with self._lock:
            return self._lock.wait_for(lambda: self.refused >= count, timeout_s)

    def redirect(self, target: str) -> None:
        """Forward new connections to another address."""
        self._target = split_address(target)

    def close(self) -> None:
        """End all connections and stop listening."""
        self.cut()
        _end(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                with self._lock:
                    whole = self._whole
                    self.refused += not whole
                    self._lock.notify_all()
                if not whole:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with self._lock:
            self._open -= {source, sink}
        for one in (source, sink):
            _end(one)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
