"""Processes of the cluster: found by their role, and signalled only while they are the same processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from nfdt.chaos.schedule import TargetRole

MARK = "CHAOS_TRIAL"  # variable in the environment of every process of a trial
_TITLE = re.compile(r"nfdt (worker|shard) (\d+)$")  # of a forked slot
_NAME = re.compile(r"--name \S*?(worker|shard)-(\d+)-\w+ ")  # on the command line of any other slot


@dataclass(frozen=True)
class ClusterProcess:
    """One live process of the cluster.

    Attributes:
        role: Its role.
        index: Its index among those of the role.
        process: The process, identified by its number and its start.
    """

    role: TargetRole
    index: int
    process: psutil.Process

    def __str__(self) -> str:
        return f"{self.role} {self.index}"

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return False if the process has ended, whatever has its number now."""
        return send_signal(self.process, number)


def send_signal(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal to a process; return False if it has ended, also if another one has its number now.

    The descriptor belongs to whatever has the number now. If that is the process after the descriptor was opened, the
    signal cannot reach any other one.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not, nor does another process with the same number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_slots(parent: psutil.Process) -> list[ClusterProcess]:
    """Return the live slots among the descendants of a process, by role and index."""
    found = []
    for process in _descendants(parent):
        with contextlib.suppress(psutil.Error):
            match = _TITLE.match(process.name()) or _NAME.search(f"{' '.join(process.cmdline())} ")
            if match and is_alive(process):
                role: TargetRole = "worker" if match[1] == "worker" else "shard"
                found.append(ClusterProcess(role, int(match[2]), process))
    return sorted(found, key=lambda one: (one.role, one.index))


def _descendants(parent: psutil.Process) -> list[psutil.Process]:
    try:
        return parent.children(recursive=True) if is_alive(parent) else []
    except psutil.Error:
        return []


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the live processes that were started with this mark in their environment, this one excepted."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and is_alive(process):
                yield process
