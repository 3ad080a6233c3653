"""TLS for the ranks of one launch: an authority in memory, and files of the one certificate that it issues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nfdt.core.host.private_files import private_folder, write_private

PREFIX = "nfdt-tls-"  # of the folder's name
VALID_DAYS = 366  # longer than a scheduler lets a job run


@dataclass(frozen=True)
class ServerTls:
    """Certificate and key of a server as PEM files, and the PEM certificate of the authority that peers trust."""

    cert: Path
    key: Path
    authority: bytes


@contextmanager
def one_time_tls(hosts: list[str]) -> Iterator[ServerTls]:
    """Issue a certificate for ``hosts`` and keep its files, mode 0600, until the block ends.

    The authority's key is never stored and is lost when this function has issued the certificate.
    """
    from nfdt.core.wire.certificates import CertificateAuthority  # takes 0.1 s to import

    authority = CertificateAuthority("nfdt one-time authority", VALID_DAYS)
    pair = authority.issue(hosts)
    with private_folder(PREFIX) as folder:
        tls = ServerTls(folder / "server.pem", folder / "server.key", authority.cert)
        write_private(tls.cert, pair.cert + authority.cert)
        write_private(tls.key, pair.key)
        yield tls


@contextmanager
def authority_file(authority: str) -> Iterator[Path]:
    """Write PEM certificates to a private file that exists until the block ends."""
    with private_folder(PREFIX) as folder:
        write_private(folder / "ca.pem", authority.encode())
        yield folder / "ca.pem"
