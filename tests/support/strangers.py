"""Connections that say nothing that is valid."""

from __future__ import annotations

import select
import socket
import time

from nfdt.core.wire.channel import split_address

DEADLINE_S = 60.0


class Strangers:
    """Connections to ``address`` that send ``begins`` and nothing after it."""

    def __init__(self, address: str, begins: bytes = b"") -> None:
        self._address, self._begins = split_address(address), begins
        self.open: list[socket.socket] = []

    def connect(self, count: int, source: str = "127.0.0.1") -> None:
        for _ in range(count):
            one = socket.create_connection(self._address, DEADLINE_S, source_address=(source, 0))
            self.open.append(one)
            try:
                one.sendall(self._begins)
            except OSError:  # the server has closed it already
                continue

    def close(self) -> None:
        for one in self.open:
            one.close()

    def until(self, most: int) -> None:
        """Wait until the server has left at most ``most`` of them open."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.open) > most:
            poll = select.poll()
            for one in self.open:
                poll.register(one, select.POLLRDHUP | select.POLLHUP)
            ended = {descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            assert ended, f"{len(self.open)} connections are open, expected at most {most}"
            for one in [one for one in self.open if one.fileno() in ended]:
                one.close()
                self.open.remove(one)
