"""Connections to other ranks that Horovod leaves open when it shuts down.

A rank that waits for this one learns only from their end that it has left the world; else it waits for Gloo's timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

Link = tuple[int, int]  # file descriptor, inode


def open_links() -> set[Link]:
    """This process's established TCP connections, but for those that a server of its own has accepted."""
    import psutil  # Horovod's launcher needs it; nothing else here does

    found = psutil.Process().net_connections(kind="tcp")
    served = {link.laddr.port for link in found if link.status == psutil.CONN_LISTEN}
    links = set()
    for link in found:
        if link.status == psutil.CONN_ESTABLISHED and link.laddr.port not in served:
            with contextlib.suppress(OSError):
                links.add((link.fd, os.fstat(link.fd).st_ino))
    return links


class RankSockets:
    """The connections that were opened while this process entered the world it is in."""

    def __init__(self) -> None:
        self._links: set[Link] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside the block the world is entered."""
        before = open_links()
        yield
        self._links = open_links() - before

    def cut(self) -> None:
        """End those that are still open; the descriptors stay Horovod's."""
        for descriptor, inode in self._links:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as link:
                        link.shutdown(socket.SHUT_RDWR)
        self._links = set()
