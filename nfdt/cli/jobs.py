"""``nfdt jobs``: inspect the jobs of a server, follow them, fetch results, cancel, resume, delete."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import click
import numpy as np
from nfdt_client.connection import JobsClient
from nfdt_client.handle import LEVELS, JobHandle, JobResult, JobStatus, describe_log, status_of
from nfdt_client.upload import open_artifact

from nfdt.cli import WholeSentences
from nfdt.cli.job_pictures import draw_progress, plot_job
from nfdt.cli.options import format_option, log_to_stderr, with_connection, with_job_id
from nfdt.cli.table import count_of, format_bytes, render, state_of, worker_table
from nfdt.core.errors import UsageError
from nfdt.core.host.startup import quiet_start
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SUFFIXES = (".keras", ".npz")


def with_job(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument ``[ID]``, and call the command with the handle of that job first."""

    @with_job_id
    @wraps(command)
    def for_job(connection: JobsClient, job_id: str, **rest: Any) -> None:
        command(JobHandle(job_id, connection), **rest)

    return for_job


@click.group(cls=WholeSentences)
def jobs() -> None:
    """List and inspect jobs, follow their logs, fetch results, cancel, resume, delete.

    Where a command takes [ID], it is by default the job that was submitted last, one that has not ended before others.
    """


def _read_age(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Return the seconds of ``30m``, ``12h`` or ``7d``; None if the option is not given."""
    if text is None:
        return None
    with contextlib.suppress(ValueError, KeyError):
        if 0 <= (seconds := float(text[:-1]) * UNITS[text[-1:]]) < float("inf"):
            return seconds
    raise click.BadParameter(f"expected a number and s, m, h or d, as in 12h. Received: {text!r}.", context, parameter)


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}" if seconds else "-"


def _epoch(status: JobStatus, separator: str) -> str:
    """Format the current epoch, counted from 1 as Keras prints it."""
    begun = 0 if status.state in ("queued", "starting") else min(status.epoch + 1, status.epochs)
    return f"{begun}{separator}{status.epochs}"


def _duration(status: JobStatus) -> str:
    return "-" if status.duration_s is None else f"{timedelta(seconds=round(status.duration_s))}"


COLUMNS = ("job", "name", "state", "user", "script", "algorithm", "workers", "epoch", "duration", "submitted")


def _row(status: JobStatus) -> tuple[str, ...]:
    who = (status.user or "-", status.script or "-")
    numbers = (str(status.workers), _epoch(status, "/"), _duration(status), _when(status.submitted_at))
    return (status.job_id, status.given_name or "-", state_of(status), *who, status.algorithm, *numbers)


@jobs.command("list")
@format_option()
@with_connection
def list_(connection: JobsClient, format_: str) -> None:
    """List the jobs of a server, oldest first."""
    statuses = [status_of(description) for description in connection.list()]
    if format_ == "json":
        click.echo(json.dumps([asdict(status) for status in statuses], indent=2))
    else:
        click.echo(render(COLUMNS, [_row(status) for status in statuses], left=6))


def _description(status: JobStatus) -> str:
    facts = [
        ("job", f"{status.job_id} ({', '.join(filter(None, [status.given_name, status.name]))})"),
        ("state", state_of(status) + (f": {status.reason}" if status.reason else "")),
        ("by", f"{status.user or '-'}, {status.script or '-'}"),
        ("algorithm", f"{status.algorithm}, {count_of(status.workers, 'worker')}"),
        ("epoch", _epoch(status, " of ")),
        ("logs", "  ".join(f"{name} {describe_log(value)}" for name, value in status.logs.items()) or "-"),
        ("submitted", _when(status.submitted_at)),
        ("ended", _when(status.ended_at)),
        ("duration", _duration(status)),
    ]
    if status.resumable_from:
        facts.append(("resumable", f"from epoch {status.resumable_from + 1}: nfdt jobs resume {status.job_id}"))
    lines = [f"{name:<10} {value}" for name, value in facts]
    return "\n".join([*lines, "", worker_table(status.worker_statistics)] if status.worker_statistics else lines)


@jobs.command()
@format_option()
@with_job
def show(handle: JobHandle, format_: str) -> None:
    """Show one job: state, numbers, and what each worker did."""
    status = handle.status()
    click.echo(json.dumps(asdict(status), indent=2) if format_ == "json" else _description(status))


@jobs.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Begin with the last N lines so far.")
@click.option("--since", default=None, callback=_read_age, metavar="AGE", help="Only what is younger: 30s, 10m, 12h.")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="info",
    show_default=True,
    help="Only what is at least so severe; debug adds progress and speeds.",
)
@with_job
def logs(handle: JobHandle, follow: bool, tail: int | None, since: float | None, level: str) -> None:
    """Print what happened in a job, one line each."""
    begin = 0.0 if since is None else time.time() - since
    for line in handle.logs(follow, tail=tail, since=begin, level=level):
        click.echo(line)


@jobs.command()
@with_job
def attach(handle: JobHandle) -> None:
    """Follow a job until it ends, with Keras' bar on a terminal; the exit code tells how."""
    draw_progress(handle.events(), sys.stdout, handle.status().epochs)
    handle.wait()


@jobs.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="j.png, j.svg or j.pdf.")
@with_job
def plot(handle: JobHandle, output: Path) -> None:
    """Draw the metrics and the speeds of a job into a picture; needs matplotlib."""
    plot_job(handle.status(), list(handle.recorded()), output)
    click.echo(f"saved {output}", err=True)


@jobs.command()
@click.option("--reason", default="cancelled from the command line", help="Kept with the job.")
@with_job
def cancel(handle: JobHandle, reason: str) -> None:
    """Give a job up."""
    if (status := handle.status()).ended:
        click.echo(f"job {handle.job_id} has ended already: {status.state}", err=True)
        return
    handle.cancel(reason)
    click.echo(f"cancelled job {handle.job_id}", err=True)


@jobs.command()
@with_connection
@click.argument("job_id", metavar="ID")
def resume(connection: JobsClient, job_id: str) -> None:
    """Go on from the last epoch's state of a failed or cancelled job, as a new detached job; prints its id."""
    click.echo(connection.resume(job_id))


@jobs.command()
@with_connection
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
def delete(connection: JobsClient, job_ids: tuple[str, ...]) -> None:
    """Remove jobs that have ended, with their logs, states and data that no other job needs."""
    for job_id in job_ids:
        click.echo(_deleted(connection.delete(job_id)), err=True)


@jobs.command()
@click.option("--older-than", default="7d", show_default=True, callback=_read_age, metavar="AGE", help="30m, 12h, 7d")
@with_connection
def prune(connection: JobsClient, older_than: float) -> None:
    """Remove all jobs that ended so long ago, as `delete` does."""
    click.echo(_deleted(connection.delete(older_than_s=older_than)), err=True)


def _deleted(reply: pb.DeleteReply) -> str:
    return f"deleted {', '.join(reply.job_ids) or 'no job'}: {format_bytes(reply.bytes)} are free"


def _result_file(_context: click.Context, _parameter: click.Parameter, path: Path) -> Path:
    """Return the path if a result can be written there; refuse another before the job is waited for."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output: expected a name that ends in {' or '.join(SUFFIXES)}. Received: {path}.")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--output: the directory {path.resolve().parent} does not exist.")
    return path


@jobs.command()
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    callback=_result_file,
    help="m.keras, or m.npz for the weights.",
)
@with_connection
@click.argument("job_id", metavar="ID")
def result(connection: JobsClient, job_id: str, output: Path) -> None:
    """Wait for a job's end and save what it trained."""
    log_to_stderr("warning")
    _save(JobHandle(job_id, connection).result(), output, lambda name: open_artifact(connection, name))
    click.echo(f"saved {output}", err=True)


def _save(result: JobResult, path: Path, read: Callable[[str], bytes | memoryview]) -> None:
    """Write the whole model (``.keras``), or the trainable variables by name (``.npz``).

    Args:
        result: Result of the job.
        path: The file.
        read: Returns an artifact of the job's server by its name.

    Raises:
        PolicyRefused: a ``.keras`` file of a job that carries code; data from a server are never unpickled here.
    """
    manifest = Manifest(result.manifest)
    if path.suffix == ".npz":
        slots = manifest.layout.slots
        named: dict[str, Any] = {slot.name: array for slot, array in zip(slots, result.weights, strict=True)}
        np.savez(path, **named)
        return
    with quiet_start():
        from nfdt.model.program.unpack import unpack

    model = unpack(manifest, read, allow_code=False)
    if model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
    result.apply_to(model)
    model.save(path)
