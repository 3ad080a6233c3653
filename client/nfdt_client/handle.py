"""Handle of a detached job: show its status, follow its events, fetch its result, cancel it."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import JobFailed, UsageError
from nfdt.core.events import Event
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt_client.connection import TERMINAL, JobsClient, is_end
from nfdt_client.failures import failure_of
from nfdt_client.tracebacks import hide_frames
from nfdt_client.upload import download, fetch_state

POLL_S = 0.5
LEVELS = ("debug", "info", "warning", "error")
NAMED = 3
"""Workers that a line of the log names, if there are more than one other."""

HistoryValue = float | npt.NDArray[Any]


@dataclass(frozen=True)
class JobStatus:
    """Status of a job as reported by its server; times are Unix seconds, 0 when not reached.

    Attributes:
        given_name: Name that the script gave to the job; "" for none.
        place: Place in the queue, from 1 on; 0 for a job that does not wait.
        starts_in_s: Estimate of the seconds until it starts; None: unknown.
        resumable_from: Number of epochs from which a failed or cancelled job can be resumed; 0: it cannot.
    """

    job_id: str
    name: str
    state: str
    reason: str
    algorithm: str
    workers: int
    epoch: int
    epochs: int
    submitted_at: float
    ended_at: float
    logs: Mapping[str, Any]
    worker_statistics: Mapping[str, Any]
    user: str = ""
    script: str = ""
    started_at: float = 0.0
    place: int = 0
    starts_in_s: float | None = None
    resumable_from: int = 0
    given_name: str = ""

    @property
    def duration_s(self) -> float | None:
        """Seconds since the job got its slots, until now or its end; None while it waits."""
        return (self.ended_at or time.time()) - self.started_at if self.started_at else None

    @property
    def ended(self) -> bool:
        """Whether the job has ended, in whatever way."""
        return self.state in TERMINAL


@dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        weights: The trainable variables in model order, without tables of ``nfdt.Embedding``; one flat vector if the
            server does not send the shapes.
        history: As ``History.history``: one list per metric, one entry per epoch; arrays for metrics whose result
            is an array.
        workers: Statistics of each worker, as in ``history.nfdt``.
        manifest: The program's manifest (model configuration, layout, ...); empty when unknown.
        artifact: Name of the state on its server.
        server: ``HOST:PORT`` of the server.
    """

    weights: list[Array]
    history: dict[str, list[HistoryValue]]
    workers: dict[str, Any]
    manifest: dict[str, Any]
    state: State
    artifact: str
    server: str

    def apply_to(self, model: Any) -> None:
        """Write weights, optimizer state and untrained state into a built Keras model of the same architecture.

        Tables of ``nfdt.Embedding`` stay on the server; ``fit``, ``evaluate`` and ``predict`` there go on with them.
        """
        from nfdt_client import tables
        from nfdt_client.model_state import ModelState

        manifest = Manifest(self.manifest) if self.manifest else None
        ModelState.of(model, manifest).write(self.state)
        if manifest is not None:
            tables.remember(model, manifest, self.server, self.artifact)


class JobHandle:
    """A job on a server, by its id.

    Args:
        job_id: The job.
        connection: Connection to its server; stays open as long as the handle is used.
    """

    def __init__(self, job_id: str, connection: JobsClient) -> None:
        self.job_id = job_id
        self._connection = connection

    def __repr__(self) -> str:
        return f"JobHandle({self.job_id!r}, server={self._connection.address!r})"

    @property
    def server(self) -> str:
        """``HOST:PORT`` of the job's server."""
        return self._connection.address

    @hide_frames
    def status(self) -> JobStatus:
        """Return the current status of the job."""
        return status_of(self._connection.show(self.job_id))

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the events after a cursor, then live ones until the job has ended; reconnects broken streams."""
        return self._connection.watch(self.job_id, after)

    def recorded(self) -> Iterator[Event]:
        """Yield the events so far."""
        return self._connection.recorded(self.job_id)

    def logs(
        self, follow: bool = False, *, tail: int | None = None, since: float = 0.0, level: str = "debug"
    ) -> Iterator[str]:
        """Yield one line per event: those so far, or with ``follow`` until the job has ended.

        Args:
            follow: Whether to wait for later events.
            tail: Number of the last lines so far to begin with; None: all of them.
            since: Unix time before which events are left out.
            level: Least level of an event: ``debug``, ``info``, ``warning`` or ``error``; see :func:`level_of`.
        """
        least = LEVELS.index(level)

        def is_shown(event: Event) -> bool:
            return event.at >= since and LEVELS.index(level_of(event)) >= least

        if tail is None:
            events: Iterable[Event] = self.events() if follow else self.recorded()
        else:
            last, kept = 0, deque[Event](maxlen=tail)
            for event in self.recorded():
                last = event.cursor
                if is_shown(event):
                    kept.append(event)
            events = chain(kept, self.events(last) if follow else ())
        yield from map(format_event, filter(is_shown, events))

    @hide_frames
    def result(self, timeout_s: float | None = None) -> JobResult:
        """Wait for the job's end and fetch its result.

        Raises:
            TimeoutError: it has not ended within ``timeout_s`` seconds.
            JobFailed, JobCancelled, or the exception of a worker's code: it ended without success.
        """
        return self._fetch(*self._wait(timeout_s))

    @hide_frames
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the job's end without fetching its result; the errors are those of :meth:`result`."""
        self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> tuple[dict[str, Any], dict[str, list[HistoryValue]]]:
        history: dict[str, list[HistoryValue]] = {}
        produced: dict[str, Any] = {}
        for event in self._until_end(timeout_s):
            if event.kind == "epoch_end":
                for name, value in epoch_logs(event.data).items():
                    history.setdefault(name, []).append(value)
            elif event.kind == "result":
                produced = event.data
            elif is_end(event) and event.data["state"] != "succeeded":
                raise failure_of(self.job_id, event.data)
        return produced, history

    @hide_frames
    def cancel(self, reason: str = "cancelled by its owner") -> None:
        """Cancel the job; it ends as cancelled."""
        self._connection.control(self.job_id, cancel=pb.Cancel(reason=reason))

    def close(self) -> None:
        """Close the connection; the job continues."""
        self._connection.close()

    def _until_end(self, timeout_s: float | None) -> Iterator[Event]:
        if timeout_s is None:
            yield from self.events()
            return
        deadline = time.monotonic() + timeout_s
        while not self.status().ended:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"Job {self.job_id} has not ended within {timeout_s:g} s. It goes on.")
            time.sleep(min(left, POLL_S))
        yield from self.events()

    def _fetch(self, produced: Mapping[str, Any], history: dict[str, list[HistoryValue]]) -> JobResult:
        description = self._connection.show(self.job_id)
        if (method := produced.get("method", "fit")) != "fit":
            raise UsageError(
                f"Job {self.job_id}: expected a job that trains, whose result is a trained model. Received: one of "
                f"model.{method}, whose result only its script can read."
            )
        artifact = produced.get("artifact") or description.result_artifact
        if not artifact:
            raise JobFailed(f"Job {self.job_id} has ended but its server holds no result.")
        entries = json.loads(download(self._connection, description.program)) if description.program else {}
        manifest = Manifest(entries) if entries else None
        state = fetch_state(self._connection, str(artifact), manifest)
        weights: list[Array] = [np.array(state.weights)]
        if manifest is not None:
            layout = manifest.layout.without([*manifest.made])
            weights = [np.array(w) for w in layout.unflatten(state.weights)]
        workers = dict(produced.get("workers") or json.loads(description.workers_json or "{}"))
        return JobResult(weights, history, workers, entries, state, str(artifact), self.server)


@hide_frames
def attach(job_id: str, server: str | None = None, *, token: str | None = None, **connection: Any) -> JobHandle:
    """Return a handle of a job that runs or has run on a server.

    Args:
        job_id: The job.
        server: ``HOST:PORT``; may come from the environment or a file instead.
        token: The server's secret; may come from the environment or a file instead.
        **connection: ``token_file``, ``ca_file``, ``cert_file``, ``key_file`` or ``insecure``.

    Raises:
        UsageError: no server is named, or it has no such job.
        ServerUnreachable: no server answers at the address.
    """
    from nfdt_client.options import resolve

    options = resolve({"server": server, "token": token, **connection})
    if options.server is None:
        raise UsageError("attach: expected server='HOST:PORT', or NFDT_SERVER in the environment. Received: none.")
    link = JobsClient(options.server, options.token(), **options.tls)
    link.show(job_id)
    return JobHandle(job_id, link)


def status_of(description: pb.JobDescription) -> JobStatus:
    """Convert the message to a JobStatus."""
    parsed = {
        "logs": json.loads(description.last_logs_json or "{}"),
        "worker_statistics": json.loads(description.workers_json or "{}"),
        "starts_in_s": description.starts_in_s if description.HasField("starts_in_s") else None,
    }
    # All other fields have the names that they have in the message.
    same = {each.name: getattr(description, each.name) for each in fields(JobStatus) if each.name not in parsed}
    return JobStatus(**same, **parsed)


def epoch_logs(data: Mapping[str, Any]) -> dict[str, HistoryValue]:
    """Return the logs of an ``epoch_end`` event as in Keras: validation with prefix ``val_``, lists as arrays."""
    validation = {f"val_{name}": value for name, value in as_logs(data.get("val_logs")).items()}
    return as_logs(data.get("logs")) | validation


def as_logs(logs: Mapping[str, Any] | None) -> dict[str, HistoryValue]:
    """Return logs of an event as in Keras, with lists as arrays."""
    return {name: _as_array(value) for name, value in (logs or {}).items()}


def _as_array(value: Any) -> HistoryValue:
    """Convert a list to an array, float32 (the dtype of Keras' metrics) if lossless; return other values unchanged."""
    if not isinstance(value, list):
        return value
    array = np.asarray(value)
    with np.errstate(over="ignore"):
        single = array.astype(np.float32) if array.dtype == np.float64 else array
    return single if np.array_equal(single, array, equal_nan=array.dtype.kind == "f") else array


def describe_log(value: HistoryValue) -> str:
    """Format a log's value in a few characters."""
    if isinstance(value, float | int):
        return f"{value:.4g}"
    return np.array2string(np.asarray(value), precision=4, threshold=8, max_line_width=1000).replace("\n", "")


def _numbers(logs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={describe_log(value)}" for name, value in logs.items())


def describe_stall(data: Mapping[str, Any]) -> str:
    """Format a ``stalled`` event as text."""
    names = sorted(data.get("waiting_for") or ["workers"], key=lambda name: (len(name), name))
    more = f" and {len(names) - NAMED} others" if len(names) > NAMED + 1 else ""
    who = ", ".join(names[:NAMED] if more else names) + more
    what = f" (tensors: {', '.join(data['tensors'])})" if data.get("tensors") else ""
    return f"Training has waited {data.get('since_s', 0.0):.0f} s for {who}{what}"


def level_of(event: Event) -> str:
    """Return the level of an event, one of :data:`LEVELS`; events that only count are ``debug``."""
    if event.kind == "log":
        level = str(event.data.get("level"))
        return level if level in LEVELS else "info"
    if event.kind == "state" and event.data.get("state") == "failed":
        return "error"
    if event.kind in ("worker_lost", "shard_lost", "stalled"):
        return "warning"
    return "debug" if event.kind in ("progress", "speed") else "info"


def describe_forecast(data: Mapping[str, Any]) -> str:
    """Describe how far a ``forecast`` event's prediction was off."""
    planned, measured = data["samples_per_s"], data["measured_samples_per_s"]
    return (
        f"planned {planned:,.0f} samples/s at a staleness of {data['staleness']:.1f}; measured {measured:,.0f} at "
        f"{data['measured_staleness']:.1f} ({100 * (measured / planned - 1):+.0f} %)"
    )


def format_event(event: Event) -> str:
    """Format an event as one readable line."""
    data = event.data
    kind, epoch = str(event.kind), data.get("epoch", 0) + 1
    text = {
        "state": lambda: " ".join(str(data[k]) for k in ("state", "reason") if data.get(k)),
        "worker_joined": lambda: f"{data.get('worker')} joined ({data.get('host')}, {data.get('device')})",
        "worker_lost": lambda: f"{data.get('worker')}: {data.get('reason')}; {data.get('requeued', 0)} tasks back",
        "shard_lost": lambda: f"{data.get('shard')}: {data.get('reason')}",
        "shards_restored": lambda: f"after {data.get('seconds')} s; {data.get('redone_samples', 0)} samples redone",
        "epoch_begin": lambda: f"epoch {epoch} begins",
        "progress": lambda: f"epoch {epoch} step {data.get('steps')} {_numbers(data.get('logs') or {})}",
        "speed": lambda: ", ".join(
            f"{worker}: {row['samples_per_s']:.4g} samples/s, batches of {row['batch_size']}"
            for worker, row in data.get("workers", {}).items()
        ),
        "epoch_end": lambda: f"epoch {epoch} ends {_numbers(epoch_logs(data))}",
        "forecast": lambda: describe_forecast(data),
        "plan": lambda: str(data.get("reason")),
        "stalled": lambda: describe_stall(data),
        "codec": lambda: f"{data.get('worker')}: gradients in {data.get('push')}, weights in {data.get('reply')}",
        "log": lambda: f"{data.get('worker') or 'server'}: {data.get('text')}",
        "result": lambda: f"result {data.get('artifact')}",
    }.get(kind, lambda: json.dumps(data))()
    return f"{datetime.fromtimestamp(event.at):%Y-%m-%d %H:%M:%S} {kind:<13} {text}"
