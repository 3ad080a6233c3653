"""Processes of a machine: found by their network namespace, signalled without a race for their ids."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator

from tests.support.machines.plan import RigError, namespace_of

DEADLINE_S = 20


def members(namespaces: Collection[str], spared: Collection[int] = ()) -> list[int]:
    """Return the ids of all processes in the namespaces; those that have ended but were not awaited do not count."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in spared and _is_member(int(entry), namespaces):
            found.append(int(entry))
    return found


def signal_all(namespaces: Collection[str], number: int, spared: Collection[int] = ()) -> None:
    """Send a signal to all processes in the namespaces, until those started meanwhile have it too.

    Raises:
        RigError: Processes neither stopped nor ended in time.
    """
    deadline = time.monotonic() + DEADLINE_S
    while pids := list(_remaining(namespaces, number, spared)):
        for pid in pids:
            _send(pid, number, namespaces)
        if time.monotonic() > deadline:
            raise RigError(f"processes {pids} did not obey {signal.Signals(number).name} within {DEADLINE_S} s")
        time.sleep(0.005)


def _remaining(namespaces: Collection[str], number: int, spared: Collection[int]) -> Iterator[int]:
    for pid in members(namespaces, spared):
        state = _state(pid)
        reached = {signal.SIGSTOP: state in "TtZX", signal.SIGCONT: state not in "T"}.get(number, state in "ZX")
        if not reached:
            yield pid


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _is_member(pid: int, namespaces: Collection[str]) -> bool:
    try:
        return namespace_of(pid) in namespaces
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _send(pid: int, number: int, namespaces: Collection[str]) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _is_member(pid, namespaces):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
