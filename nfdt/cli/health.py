"""``nfdt health``: whether a job server answers; for probes of containers."""

from __future__ import annotations

import click

from nfdt.cli.options import FILE, find_job_server
from nfdt.core.errors import ServerUnreachable
from nfdt.core.host.packages import require_server_packages
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.status import translated


@click.command()
@click.option("--server", metavar="HOST:PORT", help="Job server; without it, that of your script on this machine.")
@click.option("--ca-file", type=FILE, help="Certificates to trust; turns TLS on.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=10, show_default=True)
def health(server: str | None, ca_file: str | None, timeout_s: float) -> None:
    """Ask a job server whether it serves; needs no token. The exit code is 4 if it does not.

    With a startup probe, for example: nfdt health --server localhost:7777 --ca-file ca.pem
    """
    require_server_packages("nfdt health")
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options, local = find_job_server(server=server, ca_file=ca_file)
    address = options.server or (local.address if local is not None else "")
    with translated(address), open_channel(address, "", **(options.tls if options.server else {})) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ServerUnreachable(f"{address} answers, but does not serve.")
    click.echo(f"{address} serves")
