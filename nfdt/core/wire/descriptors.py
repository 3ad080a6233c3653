"""Limits of this process' open files and connections."""

from __future__ import annotations

import resource

MOST_CONNECTIONS = 2**14
RESERVED = 256  # descriptors for files, slots and rings; at least a quarter of the limit


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the hard limit; processes that it starts inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports infinity but allows less
        return


def most_connections() -> int:
    """Return the number of connections that leaves enough descriptors for the files of jobs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - max(RESERVED, soft // 4)))
