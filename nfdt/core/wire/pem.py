"""Certificates and keys as PEM data or as paths of files with them."""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nfdt.core.errors import UsageError

Pem = str | Path | bytes
"""PEM data (bytes), or the path of a file with them."""


def read_pem(pem: Pem) -> bytes:
    """Return PEM data."""
    return pem if isinstance(pem, bytes) else Path(pem).read_bytes()


def load_key_pair(context: ssl.SSLContext, cert: Pem, key: Pem | None) -> None:
    """Load a certificate and its key into a TLS context, which takes files only."""
    if not isinstance(cert, bytes) and not isinstance(key, bytes):
        context.load_cert_chain(cert, key)
        return
    with tempfile.NamedTemporaryFile() as file:  # mode 0600, removed at once
        file.write(read_pem(cert) + b"\n" + (read_pem(key) if key else b""))
        file.flush()
        context.load_cert_chain(file.name)


def trust(context: ssl.SSLContext, authority: Pem) -> None:
    """Make a TLS context trust certificates."""
    context.load_verify_locations(cadata=read_pem(authority).decode())


@contextlib.contextmanager
def checked(expected: str, *pems: Pem | None) -> Iterator[None]:
    """Turn an error of the TLS library about PEM data into an error that names the files.

    Args:
        expected: What the data must be.
        *pems: The data.

    Raises:
        UsageError: The block raised an error about them.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)
        files = ", ".join(str(pem) for pem in pems if pem and not isinstance(pem, bytes)) or "PEM data"
        raise UsageError(
            f"TLS: expected {expected}. Received: {files} ({reason.replace('_', ' ').lower()}). "
            "Give matching PEM files that this user can read; `nfdt certs` makes some."
        ) from None
