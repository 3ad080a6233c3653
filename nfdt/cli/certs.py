"""``nfdt certs``: certificates for a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_server_packages
from nfdt.core.host.private_files import ensure_folder, private

LOCAL = ("localhost", "127.0.0.1")
SERVER, CLIENT = "server", "client"


@click.command()
@click.option("--host", "hosts", multiple=True, required=True, metavar="NAME_OR_IP", help="Of the server; repeatable.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), default="certs", show_default=True)
@click.option("--days", type=click.IntRange(1, 36500), default=825, show_default=True, help="For which they are valid.")
def certs(hosts: tuple[str, ...], folder: Path, days: int) -> None:
    """Make certificates for a server that is reached as --host, and for its clients.

    Writes ca.pem, server.pem, server.key, client.pem and client.key. Existing files are never replaced. The key of
    the authority is not kept: for other hosts, make all of them anew in another directory.
    """
    require_server_packages("nfdt certs")
    from nfdt.core.wire.certificates import CertificateAuthority

    ensure_folder(folder, "--dir")
    authority = CertificateAuthority("nfdt cluster", days)
    server = authority.issue([*dict.fromkeys((*hosts, *LOCAL))], hosts[0])
    client = authority.issue([], CLIENT)
    contents = {"ca.pem": authority.cert}
    for name, pair in ((SERVER, server), (CLIENT, client)):
        contents |= {f"{name}.pem": pair.cert, f"{name}.key": pair.key}
    if existing := [name for name in contents if (folder / name).exists()]:
        raise UsageError(
            f"--dir: expected a directory without {', '.join(contents)}. Received: {folder}, which has "
            f"{', '.join(existing)}. Name another directory, or remove the files."
        )
    for name, content in contents.items():
        with open(folder / name, "xb", opener=private) as file:
            file.write(content)
        if not name.endswith(".key"):
            (folder / name).chmod(0o644)
    click.echo(
        f"made {', '.join(contents)} in {folder}, valid for {days} days and for {', '.join((*hosts, *LOCAL))}\n"
        f"server:  nfdt server --listen 0.0.0.0:7777 --tls-cert {folder / 'server.pem'} --tls-key "
        f"{folder / 'server.key'}\n"
        f"others:  --server {hosts[0]}:7777 --ca-file {folder / 'ca.pem'}"
    )
