"""One allocation of ``mpirun`` or ``srun``: which rank this is, and how rank 0 tells the others its address.

Nothing here speaks MPI: the launcher's environment says who we are, and a file that every rank can
read says where to go. Its name holds the launcher's own job id, so two runs never meet.
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
from nfdt.core.host.launcher_rank import Place

WAIT_S = 120.0
POLL_S = 0.1


@dataclass(frozen=True)
class Invitation:
    """Where rank 0 serves, and the token it accepts."""

    address: str
    token: str = field(repr=False)
    ca_file: str = ""


def meeting_file(place: Place, environment: Mapping[str, str]) -> Path:
    """The file of this launch: in ``NFDT_MEETING_DIR``, or the user's cache directory, which every rank must see."""
    base = environment.get("NFDT_MEETING_DIR")
    home = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    name = hashlib.sha256(place.job.encode()).hexdigest()[:24]
    return (Path(base) if base else home / "nfdt" / "meetings") / f"{name}.json"


@contextlib.contextmanager
def invite(path: Path, invitation: Invitation) -> Iterator[None]:
    """Rank 0: let the other ranks read the invitation inside the block; mode 0600, appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    text = json.dumps({"address": invitation.address, "token": invitation.token, "ca_file": invitation.ca_file})
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def accept(
    path: Path,
    *,
    timeout_s: float = WAIT_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Invitation:
    """Another rank: wait for rank 0's invitation.

    Raises:
        ServerUnreachable: none appeared in time.
        ProtocolError: the file is not an invitation, or others may read or write it.
    """
    deadline = now() + timeout_s
    while not path.exists():
        if now() >= deadline:
            raise ServerUnreachable(
                f"Rank 0 wrote no address to {path} within {timeout_s:.0f} s. If the ranks do not share this "
                "directory, set NFDT_MEETING_DIR to one that they do."
            )
        sleep(POLL_S)
    return read_invitation(path)


def read_invitation(path: Path) -> Invitation:
    """The invitation in a file that only its owner, this user, may read."""
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ProtocolError(f"{path} must belong to this user with mode 0600. Delete it and start again.")
    try:
        value = json.loads(path.read_text())
        return Invitation(str(value["address"]), str(value["token"]), str(value.get("ca_file", "")))
    except (ValueError, KeyError, TypeError):
        raise ProtocolError(f"{path} holds no invitation. Delete it and start again.") from None
