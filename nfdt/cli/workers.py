"""``nfdt workers``: the machines of a server, their slots, and what these do."""

from __future__ import annotations

import json

import click
from nfdt_client.connection import JobsClient

from nfdt.cli.options import format_option, with_connection
from nfdt.cli.table import count_of, render
from nfdt.core.jobs.admission import backend_of
from nfdt.core.wire import jobs_pb2 as pb

COLUMNS = ("machine", "role", "slot", "doing", "device", "python", "keras", "backend", "process")


def _row(slot: pb.SlotDescription) -> tuple[str, ...]:
    versions = [slot.versions.get(name) or "-" for name in ("python", "keras")]
    backend = backend_of(slot.versions)
    name = f"{backend} {slot.versions.get(backend) or '-'}"
    doing = f"{slot.job_id or 'free'} {slot.process}".strip() + (", not connected" if slot.away else "")
    return (slot.host, slot.role, slot.name, doing, slot.device, *versions, name, str(slot.pid))


def _entry(slot: pb.SlotDescription) -> dict[str, object]:
    return {
        "machine": slot.host,
        "role": slot.role,
        "slot": slot.name,
        "job": slot.job_id or None,
        "connected": not slot.away,
        "device": slot.device,
        "versions": dict(slot.versions),
        "process": slot.pid,
    }


@click.command()
@format_option()
@with_connection
def workers(connection: JobsClient, format_: str) -> None:
    """List the machines of a server: their slots, roles, versions, and the jobs that use them."""
    slots = connection.slots()
    if format_ == "json":
        click.echo(json.dumps([_entry(slot) for slot in slots], indent=2))
        return
    click.echo(render(COLUMNS, [_row(slot) for slot in slots], left=5))
    machines, free = len({slot.host for slot in slots}), sum(not slot.job_id and not slot.away for slot in slots)
    click.echo(f"{count_of(machines, 'machine')}, {count_of(len(slots), 'slot')}, {free} free", err=True)
