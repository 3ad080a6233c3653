"""One slot of a job server in a Ray actor; the only module of this room that Ray's nodes import."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from nfdt.core.errors import JobFailed
from nfdt.core.host.private_files import private, private_folder, sweep, write_private

PREFIX = "nfdt-ray-"  # of the folders' names
STOP_S = 10.0
TAIL_BYTES = 2000
# ``nfdt``, ended together with the actor, however that ends; -P: no file of the user shadows our modules
COMMAND = (
    "from nfdt.core.host.child_process import die_with_parent; die_with_parent(); from nfdt.cli import main; main()"
)
WORKER = (sys.executable, "-P", "-c", COMMAND, "worker")


@dataclass(frozen=True)
class RaySlotAccess:
    """Address and credentials with which a slot registers at a job server.

    Attributes:
        address: ``HOST:PORT`` of the server.
        token: Its secret for workers.
        authority: PEM certificates to trust.
    """

    address: str
    token: str = field(repr=False)
    authority: bytes = field(repr=False)


class RaySlot:
    """Actor that runs ``nfdt worker`` for one slot; Ray starts it again, on another node if its own is lost.

    Args:
        access: Connection to the server.
        offer: Options of ``nfdt worker`` that offer the slot.
    """

    def __init__(self, access: RaySlotAccess, offer: tuple[str, ...]) -> None:
        self._access, self._offer = access, offer
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Offer the slot until :meth:`stop`; a run whose caller could not be reached ends first.

        Raises:
            JobFailed: the command ended; the message names this node and holds the end of what it wrote.
        """
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        sweep(PREFIX)
        with private_folder(PREFIX) as folder:
            code = self._run_command(folder)
            if not self._stopping.is_set():
                raise JobFailed(f"{socket.gethostname()}: {_end_of(folder / 'log') or f'exit code {code}'}")

    def stop(self) -> None:
        """End the slot; :meth:`run`, which another thread executes, returns."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def _run_command(self, folder: Path) -> int:
        write_private(folder / "ca.pem", self._access.authority)
        with open(folder / "log", "wb", opener=private) as log:
            self._process = subprocess.Popen(
                [*WORKER, "--server", self._access.address, "--ca-file", str(folder / "ca.pem"), *self._offer],
                env={**os.environ, "NFDT_TOKEN": self._access.token},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        if self._stopping.is_set():
            self._process.terminate()
        return self._process.wait()


def _end_of(log: Path) -> str:
    """Return the last error that a log names, or its last line."""
    lines = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("Error: ")), lines[-1] if lines else "")
