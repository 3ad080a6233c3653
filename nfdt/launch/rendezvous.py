"""Rendezvous of the ranks of one allocation of ``mpirun`` or ``srun``.

MPI is not used: the launcher's environment names the rank, and rank 0 writes its address to a file that every rank can
read. The name of the file contains the launcher's own job id, so that two runs never mix.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nfdt.core.errors import ProtocolError, ServerUnreachable
from nfdt.core.host.launcher_rank import LauncherRank

DIRECTORY = "NFDT_RENDEZVOUS_DIR"  # environment variable
WAIT_S = 120.0  # limit for the file
RENDEZVOUS_POLL_S = 0.1  # interval of checks for the file


@dataclass(frozen=True)
class RendezvousInfo:
    """Address, secret and certificates with which the other ranks connect to rank 0.

    Attributes:
        address: ``host:port`` at which rank 0 serves.
        token: Secret that it accepts from workers.
        authority: PEM certificates that signed the server's own; empty if it serves without TLS.
    """

    address: str
    token: str = field(repr=False)
    authority: str = field(default="", repr=False)


def rendezvous_file(rank: LauncherRank, environment: Mapping[str, str]) -> Path:
    """Return the file of this launch in ``NFDT_RENDEZVOUS_DIR`` or the user's cache directory; all ranks share it."""
    base = environment.get(DIRECTORY)
    home = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    name = hashlib.sha256(rank.job.encode()).hexdigest()[:24]
    return (Path(base) if base else home / "nfdt" / "rendezvous") / f"{name}.json"


@contextlib.contextmanager
def publish_rendezvous(path: Path, rendezvous: RendezvousInfo) -> Iterator[None]:
    """Write rank 0's file for the other ranks, atomically and with mode 0600; remove it at the block's end."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Other ranks poll for this name: they must never read half a file.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(rendezvous), file)
    partial.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def await_rendezvous(
    path: Path,
    *,
    timeout_s: float = WAIT_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RendezvousInfo:
    """Wait for rank 0's file, on any other rank.

    Raises:
        ServerUnreachable: The file did not appear in time.
        ProtocolError: The file is malformed, or other users may read or write it.
    """
    deadline = now() + timeout_s
    while not _appeared(path):
        if now() >= deadline:
            raise ServerUnreachable(
                f"Rendezvous: expected rank 0's address in {path} within {timeout_s:.0f} s. Received: no file. Rank 0 "
                f"has failed, or the ranks do not share this directory: set {DIRECTORY} to one that they do."
            )
        sleep(RENDEZVOUS_POLL_S)
    return read_rendezvous(path)


def _appeared(path: Path) -> bool:
    """Whether the file exists; NFS caches the absence of a file, but not the contents of a directory that is opened."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


def read_rendezvous(path: Path) -> RendezvousInfo:
    """Read a file that only its owner, this user, may read."""
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ProtocolError(f"{path} must belong to this user with mode 0600. Delete it and start again.")
    try:
        value = json.loads(path.read_text())
        return RendezvousInfo(str(value["address"]), str(value["token"]), str(value["authority"]))
    except (ValueError, KeyError, TypeError):
        raise ProtocolError(f"{path} is no rendezvous file. Delete it and start again.") from None
