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
from dataclasses import dataclass, field
from pathlib import Path

from nfdt.core.errors import ProtocolError, ServerUnreachable
from nfdt.core.host.launcher_rank import LauncherRank

WAIT_S = 120.0  # limit for the file
RENDEZVOUS_POLL_S = 0.1  # interval of checks for the file


@dataclass(frozen=True)
class RendezvousInfo:
    """Address at which rank 0 serves, and the token that it accepts."""

    address: str
    token: str = field(repr=False)
    ca_file: str = ""


def rendezvous_file(rank: LauncherRank, environment: Mapping[str, str]) -> Path:
    """Return the file of this launch in ``NFDT_MEETING_DIR`` or the user's cache directory, which all ranks share."""
    base = environment.get("NFDT_MEETING_DIR")
    home = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    name = hashlib.sha256(rank.job.encode()).hexdigest()[:24]
    return (Path(base) if base else home / "nfdt" / "meetings") / f"{name}.json"


@contextlib.contextmanager
def publish_rendezvous(path: Path, rendezvous: RendezvousInfo) -> Iterator[None]:
    """Write rank 0's file for the other ranks, atomically and with mode 0600; remove it at the block's end."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    text = json.dumps({"address": rendezvous.address, "token": rendezvous.token, "ca_file": rendezvous.ca_file})
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
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
    while not path.exists():
        if now() >= deadline:
            raise ServerUnreachable(
                f"Rank 0 wrote no address to {path} within {timeout_s:.0f} s. If the ranks do not share this "
                "directory, set NFDT_MEETING_DIR to one that they do."
            )
        sleep(RENDEZVOUS_POLL_S)
    return read_rendezvous(path)


def read_rendezvous(path: Path) -> RendezvousInfo:
    """Read a file that only its owner, this user, may read."""
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ProtocolError(f"{path} must belong to this user with mode 0600. Delete it and start again.")
    try:
        value = json.loads(path.read_text())
        return RendezvousInfo(str(value["address"]), str(value["token"]), str(value.get("ca_file", "")))
    except (ValueError, KeyError, TypeError):
        raise ProtocolError(f"{path} holds no invitation. Delete it and start again.") from None
