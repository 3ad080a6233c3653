"""Token files: one token per line, readable by their owner only; see :mod:`nfdt.core.jobs.rights` for the lines."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from nfdt.core.errors import UsageError
from nfdt.core.jobs.rights import Holders


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the lines of a file; empty lines and lines that begin with # are skipped.

    Raises:
        UsageError: the file does not exist, other users may read it, or a line describes no token.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from None
    if mode & 0o077:
        raise UsageError(f"Token file {path}: expected mode 0600. Received: {mode:04o}. Run: chmod 600 {path}")
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    Holders(tokens)
    return tokens


def ensure_token_file(path: Path) -> tuple[str, ...]:
    """Return the lines of a file, which is created with a new token if it does not exist."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_tokens(path)
    except OSError as error:
        raise _unusable(path, error) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32) + "\n")
    return read_tokens(path)


def _unusable(path: Path, error: OSError | UnicodeDecodeError) -> UsageError:
    what = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
    return UsageError(
        f"Token file: expected a text file that user {os.geteuid()} can read, or a place where a server can make one. "
        f"Received: {path} ({what}). Name another file, or change the permissions of this one."
    )
