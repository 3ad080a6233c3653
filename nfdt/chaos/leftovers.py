"""Remains of a trial after its end: processes, files, shared memory and open ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nfdt.chaos.processes import marked, send_signal

SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 15.0  # time for processes that end with others, and for their files
POLL_S = 0.2
FOREIGN = ("__autograph_generated_file", "__pycache__", "tmp")  # of TensorFlow and Python, when they are killed


@dataclass(frozen=True)
class Leftovers:
    """Remains of a trial, each in words."""

    processes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()

    def all(self) -> list[str]:
        """Return all of them."""
        return [
            *(f"process {one}" for one in self.processes),
            *(f"file {one}" for one in self.files),
            *(f"segment {one}" for one in self.segments),
            *(f"port {one}" for one in self.ports),
        ]


@dataclass(frozen=True)
class MachineState:
    """Shared memory of this user before a trial.

    Attributes:
        segments: Names in the folder of shared memory.
    """

    segments: frozenset[str] = field(default_factory=lambda: frozenset(_segments()))

    def leftovers(self, mark: str, temporary: Path, addresses: Sequence[str]) -> Leftovers:
        """Return what a trial has left behind; wait a moment for what is about to end. Left processes are killed.

        Args:
            mark: Mark of the trial's processes.
            temporary: Directory of their temporary files.
            addresses: ``HOST:PORT`` at which they listened.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = Leftovers(
                tuple(_describe(one) for one in marked(mark)),
                tuple(sorted(one.name for one in temporary.iterdir() if not one.name.startswith(FOREIGN))),
                tuple(sorted(set(_segments()) - self.segments - _mapped())),
                tuple(address for address in addresses if _answers(address)),
            )
            if not found.all() or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for process in list(marked(mark)):
            send_signal(process, signal.SIGKILL)
        return found


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:120] or process.name()}"
    return str(process.pid)


def _segments() -> list[str]:
    """Return the names of this user's shared memory."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.append(entry.name)
    return found


def _mapped() -> set[str]:
    """Return the names of shared memory that live processes use: other programs of this user work beside a trial."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
            found |= {line.rpartition("/")[2] for line in paths if f" {SHARED_MEMORY}/" in line}
    return found


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False
