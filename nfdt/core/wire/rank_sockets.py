"""The connections between the ranks of a ring, which the libraries that opened them neither probe nor cut."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import psutil

from nfdt.core.host.link_probes import LinkProbes

Link = tuple[int, int]  # file descriptor, inode


def open_links() -> set[Link]:
    """Return this process's established TCP connections, except those that its own servers have accepted."""
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
    def recorded(self) -> Iterator[None]:
        """Record the connections opened inside the block, in which the communicator is joined."""
        before = open_links()
        yield
        self._links = open_links() - before

    def probe(self, probes: LinkProbes) -> None:
        """Let the connections fail when the machine at their other end is lost."""
        self._each(probes.apply)

    def cut(self) -> None:
        """Shut down the connections that are still open; Horovod keeps the descriptors."""
        self._each(lambda link: link.shutdown(socket.SHUT_RDWR))
        self._links = set()

    def _each(self, action: Callable[[socket.socket], None]) -> None:
        for descriptor, inode in self._links:
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as link:
                        action(link)
