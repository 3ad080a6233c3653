"""Job servers that this user's scripts run on this machine, for commands of the same user.

Each server describes itself in a file with mode 0600 for as long as it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nfdt.core.errors import UsageError
from nfdt.core.host.machine import process_lives
from nfdt.core.host.private_files import ensure_folder, replacing
from nfdt.core.host.warm import check_private, warm_folder


@dataclass(frozen=True)
class LocalServer:
    """A job server of this user on this machine.

    Attributes:
        pid: Its process id.
        address: ``HOST:PORT`` at which it answers processes of this machine in plain text.
        token: Secret that it accepts.
        folder: Directory of its state and logs.
    """

    pid: int
    address: str
    token: str = field(repr=False)
    folder: str


def servers_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the descriptions: in XDG_RUNTIME_DIR, else in the user's cache."""
    return warm_folder(environ).with_name("servers")


@contextlib.contextmanager
def described(server: LocalServer, folder: Path) -> Iterator[None]:
    """Describe a server in the folder as long as the block runs.

    Raises:
        UsageError: the folder cannot be made or written, or other users may use it.
    """
    ensure_folder(folder, "Description of a job server").chmod(0o700)
    path = folder / f"{_prefix()}{server.pid}-{secrets.token_hex(4)}.json"
    with replacing(path) as file:
        file.write(json.dumps(asdict(server)).encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def find_servers(folder: Path) -> list[LocalServer]:
    """Return the servers that are described in the folder and live; descriptions that killed ones left are removed.

    Files that other users may read or have written are ignored.
    """
    found = []
    for path in sorted(folder.glob(f"{_prefix()}*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, UsageError):  # removed meanwhile, or not to be trusted
            check_private(folder)
            check_private(path)
            server = LocalServer(**json.loads(path.read_text(encoding="utf-8")))
            if process_lives(server.pid):
                found.append(server)
            else:
                path.unlink(missing_ok=True)
    return found


def _prefix() -> str:
    """Return the prefix of the names of this machine's files."""
    # Several machines may share a home.
    return f"{socket.gethostname()}-"
