"""``nfdt trace``: what the processes of a job did, as a file for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import click

from nfdt.cli.options import connection_options, open_connection
from nfdt.cli.trace_events import trace_of
from nfdt.core.errors import UsageError


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A .json file.")
@connection_options
@click.argument("job_id", metavar="ID")
def trace(job_id: str, output: Path, server: str | None, token_file: str | None, ca_file: str | None) -> None:
    """Write when each process of a job computed, exchanged and waited; https://ui.perfetto.dev shows the file.

    It works for jobs that run, have ended or have failed: the latest 10,000 spans of each process are kept.
    """
    with open_connection(server, token_file, ca_file) as connection:
        spans, events = connection.trace(job_id), list(connection.recorded(job_id))
    found = trace_of(spans, events)
    try:
        output.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output: expected a file that can be written. Received: {error}.") from None
    processes, count = len(found["otherData"]["clocks"]), len(found["traceEvents"])
    click.echo(f"saved {output}: {count} events of {processes} processes", err=True)
