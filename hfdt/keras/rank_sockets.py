"""Connections to other ranks that Horovod leaves open when it shuts down.

A rank that waits for this one detects its departure only when they end; otherwise it waits for Gloo's timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

Link = tuple[int, int]  # file descriptor, inode


def open_links() -> set[Link]:
    """Return this process's established TCP connections, except those that its own servers have accepted."""
    import psutil  # Horovod's launcher requires it; no other code here does

    found = psutil.Process().net_connections(kind="tcp")
    served = {link.laddr.port for link in found if link.status == psutil.CONN_LISTEN}
    links = set()
    for link in found:
        if link.status == psutil.CONN_ESTABLISHED and link.laddr.port not in served:
            with contextlib.suppress(OSError):
                links.add((link.fd, os.fstat(link.fd).st_ino))
    return links


class RankSockets:
    """Connections that were opened while this process joined its current communicator."""

    def __init__(self) -> None:
        self._links: set[Link] = set()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record the connections opened inside the block, in which the communicator is joined."""
        before = open_links()
        yield
        self._links = open_links() - before

    def cut(self) -> None:
        """Shut down the connections that are still open; Horovod keeps the descriptors."""
        for descriptor, inode in self._links:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as link:
                        link.shutdown(socket.SHUT_RDWR)
        self._links = set()
