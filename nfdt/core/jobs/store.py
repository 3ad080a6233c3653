"""Jobs and their events in SQLite: with the artifacts, all that a job server keeps on disk."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nfdt.core.errors import NotStored, UsageError
from nfdt.core.events import Event, EventKind
from nfdt.core.jobs.job_record import (
    ACTIVE,
    TERMINAL,
    JobRecord,
    JobState,
    Naming,
    check_transition,
    is_terminal,
    open_database,
)
from nfdt.core.wire import jobs_pb2 as pb

_log = logging.getLogger(__name__)

_UNDONE = 1_000_000  # more than the events that a loss of power undoes; clients have seen their cursors
SPAN_BYTES = 10_000 * 19  # of one process of a job: what its ring holds
_FACTS = (
    "epoch",
    "last_logs_json",
    "workers_json",
    "result_artifact",
    "checkpoint_artifact",
    "checkpoint_epochs",
    "snapshot_artifact",
    "snapshot_json",
    "callbacks_json",
)


def _event(row: sqlite3.Row) -> Event:
    return Event(row["cursor"], row["at"], row["kind"], json.loads(row["data_json"]))


def unknown_job(job_id: str) -> UsageError:
    """Return the error for a job that does not exist."""
    return UsageError(f"No job {job_id!r} on this server. `nfdt jobs list` shows the jobs there are.")


class JobStore:
    """Database of jobs and events; every method is atomic and may be called from any thread.

    A database that cannot be read or written (full disk) raises NotStored; the same call may succeed later.

    Args:
        path: The database file; created with mode 0600 if it does not exist.
        now: Returns the Unix time in seconds.

    Attributes:
        now: The same.

    Raises:
        UsageError: The file is no database, or cannot be made or written.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self.now = path, now
        self._changed = threading.Condition()  # its lock is reentrant
        try:
            self._database = open_database(path)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"Jobs of a server: expected an SQLite database that this user can write, or none. Received: {path} "
                f"({error}). Move the file away, or choose another state directory."
            ) from None

    def close(self) -> None:
        """Close the file; no other method can be called afterwards."""
        with self._changed:
            self._database.close()

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._changed:
            try:
                yield self._database
            except sqlite3.Error as error:
                raise NotStored(
                    f"Jobs in {self._path} cannot be read or written: {error}. Expected: room on the disk, and the "
                    "right to write. Make room; the server goes on by itself then."
                ) from error

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Commit what the block executes; ``durable``: a loss of power after it does not undo it."""
        with self._using() as database:
            if durable:
                database.execute("PRAGMA synchronous=FULL")  # the commit waits for the disk
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:  # a full disk has ended it already
                    database.execute("ROLLBACK")
                raise
            finally:
                if durable:
                    database.execute("PRAGMA synchronous=NORMAL")
            self._changed.notify_all()

    def _select(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[sqlite3.Row]:
        with self._using() as database:
            return database.execute(query, values).fetchall()

    def add(
        self,
        job_id: str,
        spec_json: str,
        *,
        session: str,
        owner: str,
        naming: Naming | None = None,
        at: float | None = None,
    ) -> int:
        """Add a job that is queued since ``at``; return the cursor of the last event that is copied from one before."""
        naming, now = naming or Naming(), self.now() if at is None else at
        with self._transaction(durable=True) as database:
            if naming.before:
                database.execute("UPDATE jobs SET name=NULL WHERE job_id=?", (naming.before,))
            database.execute(
                "INSERT INTO jobs (job_id, spec_json, session, owner, state, submitted_at, name, identity_json) "
                "VALUES (?,?,?,?,'queued',?,?,?)",
                (job_id, spec_json, session, owner, now, naming.name, naming.identity_json),
            )
            taken = 0
            for event in self._epochs_of(naming.before, naming.epochs):
                taken = self._insert(job_id, event.kind, event.data, event.at).cursor
            self._insert(job_id, "state", {"state": "queued", "reason": None, "error": None}, now)
        return taken

    def _epochs_of(self, job_id: str, epochs: int) -> Iterator[Event]:
        """Yield the beginnings and ends of the first epochs of a job."""
        rows = self._select(
            "SELECT * FROM events WHERE job_id=? AND kind IN ('epoch_begin', 'epoch_end', 'validated') "
            "AND json_extract(data_json, '$.epoch') < ? ORDER BY cursor",
            (job_id, epochs),
        )
        return map(_event, rows)

    def samples_of(self, job_id: str, epochs: int) -> int:
        """Return the number of samples that the first epochs of a job trained."""
        ends = {e.data["epoch"]: e.data["samples"] for e in self._epochs_of(job_id, epochs) if e.kind == "epoch_end"}
        return int(sum(ends.values()))

    def named(self, owner: str, name: str) -> JobRecord | None:
        """Return the owner's job of this name, if there is one."""
        rows = self._select("SELECT * FROM jobs WHERE owner=? AND name=?", (owner, name))
        return JobRecord(**rows[0]) if rows else None

    def last_cursor(self, job_id: str) -> int:
        """Return the cursor of the last event of a job; 0 if there is none."""
        ((cursor,),) = self._select("SELECT MAX(cursor) FROM events WHERE job_id=?", (job_id,))
        return int(cursor or 0)

    def get(self, job_id: str) -> JobRecord:
        """Return the job in its current state.

        Raises:
            UsageError: there is no such job.
        """
        rows = self._select("SELECT * FROM jobs WHERE job_id=?", (job_id,))
        if not rows:
            raise unknown_job(job_id)
        return JobRecord(**rows[0])

    def jobs(self, states: tuple[JobState, ...] | None = None) -> list[JobRecord]:
        """Return all jobs, or those in one of ``states``, oldest first."""
        chosen = f"WHERE state IN ({','.join('?' * len(states))})" if states is not None else ""
        rows = self._select(f"SELECT * FROM jobs {chosen} ORDER BY submitted_at, rowid", states or ())
        return [JobRecord(**row) for row in rows]

    def count_states(self) -> dict[str, int]:
        """Return the number of jobs in each state that some job has."""
        return {state: count for state, count in self._select("SELECT state, COUNT(*) FROM jobs GROUP BY state")}

    def ended_before(self, age_s: float) -> list[JobRecord]:
        """Return the jobs that ended at least ``age_s`` seconds ago, oldest first."""
        last = self.now() - age_s
        return [record for record in self.jobs(TERMINAL) if record.ended_at is not None and record.ended_at <= last]

    def active_of(self, owner: str) -> list[JobRecord]:
        """Return the jobs of this owner that have not ended."""
        return [record for record in self.jobs(ACTIVE) if record.owner == owner]

    def transition(
        self,
        job_id: str,
        state: JobState,
        *,
        reason: str | None = None,
        error: dict[str, Any] | None = None,
        at: float | None = None,
    ) -> None:
        """Move the job to another state at the time ``at`` and append a state event.

        Raises:
            UsageError: the current state does not allow this transition.
        """
        with self._transaction(durable=True) as database:
            record, now = self.get(job_id), self.now() if at is None else at
            check_transition(job_id, record.state, state)
            ended_at = now if is_terminal(state) else None
            started_at = now if state == "starting" else record.started_at
            database.execute(
                "UPDATE jobs SET state=?, reason=?, started_at=?, ended_at=? WHERE job_id=?",
                (state, reason, started_at, ended_at, job_id),
            )
            if ended_at is not None:
                after = f"after {now - started_at:.1f} s" if started_at is not None else "before it began"
                _log.info("job %s %s %s%s", job_id, state, after, f": {reason}" if reason else "")
            self._insert(job_id, "state", {"state": state, "reason": reason, "error": error}, now)

    def update(self, job_id: str, **facts: Any) -> None:
        """Set some of the columns that describe the progress of a job."""
        if unknown := set(facts) - set(_FACTS):
            raise UsageError(f"Job facts: expected {', '.join(_FACTS)}. Received: {', '.join(sorted(unknown))}.")
        # A state that was stored before a loss of power must be found after it; progress may be lost.
        columns = ", ".join(f"{name}=?" for name in facts)
        with self._transaction(durable=any(name.endswith("_artifact") for name in facts)) as database:
            database.execute(f"UPDATE jobs SET {columns} WHERE job_id=?", (*facts.values(), job_id))

    def delete(self, job_id: str) -> None:
        """Remove a job that has ended, with its events.

        Raises:
            UsageError: there is no such job, or it has not ended.
        """
        with self._transaction() as database:
            record = self.get(job_id)
            if not is_terminal(record.state):
                raise UsageError(
                    f"Job {job_id}: expected a job that has ended. Received: one that is {record.state}. "
                    f"Cancel it first: nfdt jobs cancel {job_id}"
                )
            for table in ("jobs", "events", "spans"):
                database.execute(f"DELETE FROM {table} WHERE job_id=?", (job_id,))

    def add_spans(self, job_id: str, process: str, records: bytes, offset_s: float, error_s: float) -> None:
        """Add spans of a process, and delete its oldest deliveries above :data:`SPAN_BYTES`.

        Args:
            job_id: The job.
            process: As in ``worker-0``.
            records: Spans as bytes.
            offset_s: This server's clock minus that of the process, in seconds.
            error_s: Error of that difference.
        """
        with self._transaction() as database:
            insert = "INSERT INTO spans (job_id, process, records, offset_s, error_s) VALUES (?, ?, ?, ?, ?)"
            database.execute(insert, (job_id, process, records, offset_s, error_s))
            sizes = "SELECT rowid, LENGTH(records) FROM spans WHERE job_id=? AND process=? ORDER BY rowid DESC"
            total = 0
            for row, size in self._select(sizes, (job_id, process)):
                if total >= SPAN_BYTES:
                    database.execute("DELETE FROM spans WHERE rowid=?", (row,))
                total += size

    def spans(self, job_id: str) -> list[pb.ProcessSpans]:
        """Return the deliveries of spans of a job, of each process in order."""
        select = "SELECT process, records, offset_s, error_s FROM spans WHERE job_id=? ORDER BY rowid"
        return [pb.ProcessSpans(**row) for row in self._select(select, (job_id,))]

    def append(self, job_id: str, kind: EventKind, data: dict[str, Any], at: float | None = None) -> Event:
        """Add an event of the time ``at``; an epoch's end also deletes old progress events of the epoch before."""
        with self._transaction():
            event = self._insert(job_id, kind, data, at)
            if kind == "epoch_end":
                self._thin(job_id, event.cursor)
        return event

    def _insert(
        self, job_id: str, kind: EventKind, data: dict[str, Any], at: float | None = None, *, gap: int = 0
    ) -> Event:
        event = Event(self.last_cursor(job_id) + 1 + gap, self.now() if at is None else at, kind, data)
        self._database.execute(
            "INSERT INTO events VALUES (?,?,?,?,?)", (job_id, event.cursor, event.at, kind, json.dumps(data))
        )
        return event

    def _thin(self, job_id: str, end: int) -> None:
        """Keep only the last progress event of the epoch before the one that ended at ``end``."""
        ends = self._select(
            "SELECT cursor FROM events WHERE job_id=? AND kind='epoch_end' AND cursor<? ORDER BY cursor DESC LIMIT 2",
            (job_id, end),
        )
        if not ends:
            return
        last, first = ends[0][0], ends[1][0] if len(ends) > 1 else 0
        self._database.execute(
            "DELETE FROM events WHERE job_id=:job AND kind='progress' AND cursor>:first AND cursor<(SELECT MAX(cursor) "
            "FROM events WHERE job_id=:job AND kind='progress' AND cursor<:last)",
            {"job": job_id, "first": first, "last": last},
        )

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[Event]:
        """Return the events with a cursor above ``after``, in order."""
        query = "SELECT * FROM events WHERE job_id=? AND cursor>? ORDER BY cursor LIMIT ?"
        return [_event(row) for row in self._select(query, (job_id, after, limit))]

    def latest(self, job_id: str, kinds: Sequence[EventKind], limit: int) -> list[Event]:
        """Return the latest events of some kinds, in order."""
        chosen = ",".join("?" * len(kinds))
        query = f"SELECT * FROM events WHERE job_id=? AND kind IN ({chosen}) ORDER BY cursor DESC LIMIT ?"
        return [_event(row) for row in reversed(self._select(query, (job_id, *kinds, limit)))]

    def alerts(self, job_id: str, limit: int) -> list[Event]:
        """Return the latest losses, stalls, slow links, warnings, errors and failures of a job, in order."""
        query = (
            "SELECT * FROM events WHERE job_id=? AND (kind IN ('worker_lost', 'shard_lost', 'stalled', 'slow_links') "
            "OR (kind='log' AND json_extract(data_json, '$.level') IN ('warning', 'error')) "
            "OR (kind='state' AND json_extract(data_json, '$.state')='failed')) ORDER BY cursor DESC LIMIT ?"
        )
        return [_event(row) for row in reversed(self._select(query, (job_id, limit)))]

    def wait(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        """Return :meth:`events`; wait for the first of them, up to ``timeout_s`` or until :meth:`wake`."""
        with self._changed:
            found = self.events(job_id, after)
            if not found and self._changed.wait(timeout_s):
                found = self.events(job_id, after)
        return found

    def wake(self) -> None:
        """Wake all threads in :meth:`wait`."""
        with self._changed:
            self._changed.notify_all()

    def requeue(self, job_id: str, reason: str | None, spec_json: str = "", *, epoch: int = 0) -> None:
        """Queue a job again whose run was broken off, or that an earlier server had queued.

        Args:
            job_id: The job.
            reason: Why its run was broken off; None: it had not begun.
            spec_json: Its specification from now on; "": as before.
            epoch: Epoch with which it goes on.
        """
        with self._transaction(durable=True) as database:
            database.execute(
                "UPDATE jobs SET state='queued', started_at=NULL, spec_json=? WHERE job_id=?",
                (spec_json or self.get(job_id).spec_json, job_id),
            )
            event = {"state": "queued", "reason": reason, "error": None, "epoch": epoch}
            self._insert(job_id, "state", event, gap=_UNDONE)

    def restarts(self, job_id: str) -> int:
        """Return how often a job was queued again since the last end of an epoch."""
        ((count,),) = self._select(
            "SELECT COUNT(*) FROM events WHERE job_id=:job AND kind='state' "
            "AND json_extract(data_json, '$.state') = 'queued' AND json_extract(data_json, '$.reason') IS NOT NULL "
            "AND cursor > (SELECT COALESCE(MAX(cursor), 0) FROM events WHERE job_id=:job AND kind='epoch_end')",
            {"job": job_id},
        )
        return int(count)
