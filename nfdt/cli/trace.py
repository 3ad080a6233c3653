"""``nfdt trace``: the computations, exchanges and waits of a job's processes, in the trace event format of Perfetto.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from nfdt_client.connection import JobsClient

from nfdt.cli.options import with_job_id, write_output
from nfdt.core.events import Event
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.work.spans import APPLY, KINDS, LEASE, LEASES, LOCK_WAIT, STEPS, read_spans

SERVER = 1  # process number of the job server's row
# Events that are marks on the server's row, and the fields that name them.
_MARKS: dict[str, tuple[str, ...]] = {
    "worker_joined": ("worker",),
    "worker_lost": ("worker", "reason"),
    "shard_lost": ("shard", "reason"),
    "shards_restored": ("seconds",),
    "groups": ("reason",),
    "plan": ("reason",),
    "codec": ("worker", "push"),
    "stalled": ("waiting_for",),
    "state": ("state", "reason"),
}
_TRACKS = {STEPS: "steps", LEASES: "leases"}


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A .json file.")
@with_job_id
def trace(connection: JobsClient, job_id: str, output: Path) -> None:
    """Write when each process of a job computed, exchanged and waited; https://ui.perfetto.dev shows the file.

    Without ID it is the job that was submitted last, one that has not ended before others.
    It works for jobs that run, have ended or have failed: the latest 10,000 spans of each process are kept.
    """
    found = trace_of(connection.trace(job_id), list(connection.recorded(job_id)))
    write_output("--output", output, json.dumps(found))
    processes, count = len(found["otherData"]["clocks"]), len(found["traceEvents"])
    click.echo(f"saved {output}: {count} events of {processes} processes", err=True)


def trace_of(spans: Iterable[pb.ProcessSpans], events: Sequence[Event]) -> dict[str, Any]:
    """Return the trace of a job; times are microseconds since its first event, by the server's clock.

    Args:
        spans: Deliveries of the processes, of each in order.
        events: Events of the job.

    Raises:
        ValueError: the spans are no records.
    """
    deliveries: dict[str, list[pb.ProcessSpans]] = {}
    for delivery in spans:
        deliveries.setdefault(delivery.process, []).append(delivery)
    # Of all the measurements of a process's clock, the one with the least error counts for all of its spans.
    clearest = {name: min(each, key=lambda delivery: delivery.error_s) for name, each in deliveries.items()}
    zero = events[0].at if events else 0.0
    found = [*_named(SERVER, "job server", {0: "epochs"}), *_of_server(events, zero)]
    for number, name in enumerate(sorted(deliveries, key=lambda name: (len(name), name)), SERVER + 1):
        spans_of = read_spans([delivery.records for delivery in deliveries[name]])
        found += _of_process(number, name, spans_of, clearest[name].offset_s, zero)
    clocks = {name: {"offset_s": best.offset_s, "error_s": best.error_s} for name, best in clearest.items()}
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"clocks": clocks, "begins_at": zero}}


def _named(process: int, name: str, tracks: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the events that name a process and its tracks."""
    first = {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    rows = [
        {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": text}}
        for track, text in tracks.items()
    ]
    return [first, *rows]


def _span(process: int, track: int, name: str, start_s: float, seconds: float, args: Any) -> dict[str, Any]:
    """Return the event of a span that begins ``start_s`` after the job's first event."""
    times = {"ts": _micros(start_s), "dur": _micros(seconds)}
    return {"ph": "X", "pid": process, "tid": track, "name": name, **times, "args": args}


def _of_server(events: Iterable[Event], zero: float) -> Iterator[dict[str, Any]]:
    """Yield the epochs of a job, and marks for what happened to it."""
    begun: dict[int, float] = {}
    for event in events:
        if event.kind == "epoch_begin":
            begun[event.data["epoch"]] = event.at
        elif event.kind == "epoch_end" and (at := begun.get(event.data["epoch"])) is not None:
            yield _span(SERVER, 0, f"epoch {event.data['epoch'] + 1}", at - zero, event.at - at, {})
        elif event.kind in _MARKS:
            args = {field: event.data[field] for field in _MARKS[event.kind] if event.data.get(field)}
            mark = {"ph": "i", "s": "g", "name": event.kind, "ts": _micros(event.at - zero), "args": args}
            yield {"pid": SERVER, "tid": 0, **mark}


def _of_process(number: int, name: str, spans: Any, offset_s: float, zero: float) -> Iterator[dict[str, Any]]:
    """Yield the spans of a process, whose clock is ``offset_s`` behind the server's."""
    on_shard = bool(set(spans["kind"].tolist()) & {APPLY, LOCK_WAIT})
    tracks = sorted(set(spans["track"].tolist()))
    yield from _named(number, name, {t: f"worker-{t}" if on_shard else _TRACKS.get(t, "") for t in tracks})
    for start, seconds, kind, track, value in spans.tolist():
        if kind < len(KINDS):
            args = {"tasks" if kind == LEASE else "number": value}
            yield _span(number, track, KINDS[kind], start + offset_s - zero, seconds, args)


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)
