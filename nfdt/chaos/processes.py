"""Processes of a trial, found by their role, and what remains after its end: processes, files, memory and ports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def send_signal(process: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal to a process; return False if it has ended, also if another one has its number now."""
    with contextlib.suppress(OSError):
        # The descriptor refers to whatever has the number now. If that is the process after the descriptor was opened,
        # the signal cannot reach any other one.
        descriptor = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not, nor does another process with the same number."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_slots(parent: psutil.Process) -> list[ClusterProcess]:
    """Return the live slots among the descendants of a process, by role and index."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in parent.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                match = _TITLE.match(process.name()) or _NAME.search(f"{' '.join(process.cmdline())} ")
                if match and is_alive(process):
                    role: TargetRole = "worker" if match[1] == "worker" else "shard"
                    found.append(ClusterProcess(role, int(match[2]), process))
    return sorted(found, key=lambda one: (one.role, one.index))


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the live processes that were started with this mark in their environment, this one excepted."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and is_alive(process):
                yield process


SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 15.0  # time for processes that end with others, and for their files
POLL_S = 0.2
FOREIGN = ("__autograph_generated_file", "__pycache__", "tmp")  # of TensorFlow and Python, when they are killed


def find_leftovers(mark: str, temporary: Path, addresses: Sequence[str], segments_before: Collection[str]) -> list[str]:
    """Describe what a trial has left behind; wait for what is about to end, and kill processes that are left.

    Args:
        mark: Mark of the trial's processes.
        temporary: Directory of their temporary files.
        addresses: ``HOST:PORT`` at which they listened.
        segments_before: The :func:`shared_memory_segments` before the trial.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        files = sorted(one.name for one in temporary.iterdir() if not one.name.startswith(FOREIGN))
        found = [
            *(f"process {describe_process(one.pid)}" for one in marked(mark)),
            *(f"file {name}" for name in files),
            *(f"segment {name}" for name in sorted(shared_memory_segments().difference(segments_before) - _mapped())),
            *(f"port {address}" for address in addresses if _answers(address)),
        ]
        if not found or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for process in list(marked(mark)):
        send_signal(process, signal.SIGKILL)
    return found


def describe_process(pid: int) -> str:
    """Return the number of a process, and the beginning of its command line or its name if it still runs."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return f"{pid} {' '.join(process.cmdline())[:120] or process.name()}"
    return str(pid)


def shared_memory_segments() -> set[str]:
    """Return the names of this user's shared memory."""
    found = set()
    for entry in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            if entry.lstat().st_uid == os.geteuid():
                found.add(entry.name)
    return found


def _mapped() -> set[str]:
    """Return the names of shared memory that live processes use: other programs of this user work beside a trial."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            paths = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
            found |= {line.rpartition("/")[2] for line in paths if f" {SHARED_MEMORY}/" in line}
    return found


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False
