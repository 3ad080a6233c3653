"""Limits of this process' open files and connections."""

from __future__ import annotations

import resource

MOST_CONNECTIONS = 2**14
RESERVED = 256  # for files, slots and rings; or a quarter


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS says infinity, and means less
        return


def most_connections() -> int:
    """Return the number of connections that leaves enough descriptors for the files of jobs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - max(RESERVED, soft // 4)))
