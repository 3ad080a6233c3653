"""``nfdt jobs``: inspect the jobs of a server, follow them, fetch results, cancel."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from nfdt_client.handle import JobHandle, JobStatus, describe_log, status_of
from nfdt_client.upload import download

from nfdt.cli.options import log_to_stderr, open_connection, server_options
from nfdt.cli.result import check_output, save
from nfdt.cli.table import render, worker_table

_CliCommand = TypeVar("_CliCommand", bound=Callable[..., Any])

format_option = click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text")


def with_job(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: replace its argument, a job id, by the handle of that job."""

    @server_options
    @click.argument("job_id", metavar="ID")
    @wraps(command)
    def connected(job_id: str, server: str | None, token_file: str | None, ca_file: str | None, **rest: Any) -> None:
        with open_connection(server, token_file, ca_file) as connection:
            command(JobHandle(job_id, connection), **rest)

    return connected


@click.group()
def jobs() -> None:
    """List and inspect jobs, follow their logs, fetch results, cancel."""


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}" if seconds else "-"


def _epoch(status: JobStatus, separator: str) -> str:
    """Format the current epoch, counted from 1 as Keras prints it."""
    begun = 0 if status.state in ("queued", "starting") else min(status.epoch + 1, status.epochs)
    return f"{begun}{separator}{status.epochs}"


def _row(status: JobStatus) -> tuple[str, ...]:
    workers, submitted = str(status.workers), _when(status.submitted_at)
    return (status.job_id, status.state, status.algorithm, workers, _epoch(status, "/"), submitted)


@jobs.command("list")
@format_option
@server_options
def list_(format_: str, server: str | None, token_file: str | None, ca_file: str | None) -> None:
    """List the jobs of a server, oldest first."""
    with open_connection(server, token_file, ca_file) as connection:
        statuses = [status_of(description) for description in connection.list()]
    if format_ == "json":
        click.echo(json.dumps([asdict(status) for status in statuses], indent=2))
    else:
        columns = ("job", "state", "algorithm", "workers", "epoch", "submitted")
        click.echo(render(columns, [_row(status) for status in statuses], left=3))


def _description(status: JobStatus) -> str:
    facts = [
        ("job", f"{status.job_id} ({status.name})"),
        ("state", status.state + (f": {status.reason}" if status.reason else "")),
        ("algorithm", f"{status.algorithm}, {status.workers} workers"),
        ("epoch", _epoch(status, " of ")),
        ("logs", "  ".join(f"{name} {describe_log(value)}" for name, value in status.logs.items()) or "-"),
        ("submitted", _when(status.submitted_at)),
        ("ended", _when(status.ended_at)),
    ]
    lines = [f"{name:<10} {value}" for name, value in facts]
    return "\n".join([*lines, "", worker_table(status.worker_statistics)] if status.worker_statistics else lines)


@jobs.command()
@format_option
@with_job
def show(handle: JobHandle, format_: str) -> None:
    """Show one job: state, numbers, and what each worker did."""
    status = handle.status()
    click.echo(json.dumps(asdict(status), indent=2) if format_ == "json" else _description(status))


@jobs.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@with_job
def logs(handle: JobHandle, follow: bool) -> None:
    """Print what happened in a job, one line each."""
    for line in handle.logs(follow=follow):
        click.echo(line)


@jobs.command()
@with_job
def attach(handle: JobHandle) -> None:
    """Follow a job until it ends; the exit code tells how."""
    for line in handle.logs(follow=True):
        click.echo(line)
    handle.result()


@jobs.command()
@click.option("--reason", default="cancelled from the command line", help="Kept with the job.")
@with_job
def cancel(handle: JobHandle, reason: str) -> None:
    """Give a job up."""
    handle.cancel(reason)


@jobs.command()
@click.option("--output", required=True, type=click.Path(path_type=Path), help="m.keras, or m.npz for the weights.")
@server_options
@click.argument("job_id", metavar="ID")
def result(job_id: str, output: Path, server: str | None, token_file: str | None, ca_file: str | None) -> None:
    """Wait for a job's end and save what it trained."""
    log_to_stderr("warning")
    check_output(output)
    with open_connection(server, token_file, ca_file) as connection:
        save(JobHandle(job_id, connection).result(), output, lambda name: download(connection, name))
    click.echo(f"saved {output}", err=True)
