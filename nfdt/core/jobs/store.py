"""Jobs and their events in SQLite: the only durable record of a job server besides its artifacts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfdt.core.errors import NfdtError, UsageError
from nfdt.core.events import Event, EventKind
from nfdt.core.jobs.lifecycle import ACTIVE, RESTARTED, TERMINAL, JobState, check_transition, is_terminal

_log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  job_id TEXT PRIMARY KEY, spec_json TEXT NOT NULL, session TEXT NOT NULL, owner TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT, submitted_at REAL NOT NULL, ended_at REAL,
  epoch INTEGER NOT NULL DEFAULT 0, last_logs_json TEXT, workers_json TEXT,
  result_artifact TEXT, checkpoint_artifact TEXT, checkpoint_epochs INTEGER, started_at REAL);
CREATE TABLE IF NOT EXISTS events (
  job_id TEXT NOT NULL, cursor INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, data_json TEXT NOT NULL,
  PRIMARY KEY (job_id, cursor)) WITHOUT ROWID;
"""
_LATER = {"checkpoint_epochs": "INTEGER", "started_at": "REAL"}  # columns that databases of earlier versions lack
_FACTS = (
    "epoch",
    "last_logs_json",
    "workers_json",
    "result_artifact",
    "checkpoint_artifact",
    "checkpoint_epochs",
)


def _opened(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    database.row_factory = sqlite3.Row
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL"):
        database.execute(f"PRAGMA {pragma}")
    database.executescript(_SCHEMA)
    there = {row["name"] for row in database.execute("PRAGMA table_info(jobs)")}
    for column, kind in _LATER.items():
        if column not in there:
            database.execute(f"ALTER TABLE jobs ADD COLUMN {column} {kind}")
    return database


@dataclass(frozen=True)
class JobRecord:
    """One row: the current state of a job. Times are Unix seconds.

    Attributes:
        checkpoint_epochs: Number of epochs whose training ``checkpoint_artifact`` contains.
    """

    job_id: str
    spec_json: str
    session: str
    owner: str
    state: JobState
    reason: str | None
    submitted_at: float
    ended_at: float | None
    epoch: int
    last_logs_json: str | None
    workers_json: str | None
    result_artifact: str | None
    checkpoint_artifact: str | None
    checkpoint_epochs: int | None
    started_at: float | None


def unknown_job(job_id: str) -> UsageError:
    """Return the error about a job that is not there."""
    return UsageError(f"No job {job_id!r} on this server. `nfdt jobs list` shows the jobs there are.")


class JobStore:
    """Database of jobs and events; every method is atomic and may be called from any thread.

    A database that cannot be read or written (full disk) raises an NfdtError; the same call may succeed later.

    Args:
        path: The database file; created with mode 0600 if it does not exist.
        now: Returns the Unix time in seconds.

    Raises:
        UsageError: The file is no database, or cannot be made or written.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        self._changed = threading.Condition()  # its lock is reentrant
        try:
            self._database = _opened(path)
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
                raise NfdtError(
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

    def add(self, job_id: str, spec_json: str, *, session: str, owner: str) -> None:
        """Add a new job, queued."""
        with self._transaction(durable=True) as database:
            database.execute(
                "INSERT INTO jobs (job_id, spec_json, session, owner, state, submitted_at) VALUES (?,?,?,?,'queued',?)",
                (job_id, spec_json, session, owner, self._now()),
            )
            self._insert(job_id, "state", {"state": "queued", "reason": None, "error": None})

    def get(self, job_id: str) -> JobRecord:
        """Return the job in its current state.

        Raises:
            UsageError: there is no such job.
        """
        with self._using() as database:
            row = database.execute("SELECT * FROM jobs WHERE job_id=?", (job_id,)).fetchone()
        if row is None:
            raise unknown_job(job_id)
        return JobRecord(**dict(row))

    def jobs(self, states: tuple[JobState, ...] | None = None) -> list[JobRecord]:
        """Return all jobs, or those in one of ``states``, oldest first."""
        with self._using() as database:
            rows = database.execute("SELECT * FROM jobs ORDER BY submitted_at, rowid").fetchall()
        records = [JobRecord(**dict(row)) for row in rows]
        return [r for r in records if states is None or r.state in states]

    def ended_before(self, age_s: float) -> list[JobRecord]:
        """Return the jobs that ended at least ``age_s`` seconds ago, oldest first."""
        last = self._now() - age_s
        return [record for record in self.jobs(TERMINAL) if record.ended_at is not None and record.ended_at <= last]

    def active_of(self, owner: str) -> list[JobRecord]:
        """Return the jobs of this owner that have not ended."""
        return [record for record in self.jobs(ACTIVE) if record.owner == owner]

    def transition(
        self, job_id: str, state: JobState, *, reason: str | None = None, error: dict[str, Any] | None = None
    ) -> None:
        """Move the job to another state and append a state event.

        Raises:
            UsageError: the current state does not allow this transition.
        """
        with self._transaction(durable=True):
            self._transition(job_id, state, reason, error)

    def _transition(self, job_id: str, state: JobState, reason: str | None, error: dict[str, Any] | None) -> None:
        record = self.get(job_id)
        check_transition(job_id, record.state, state)
        now = self._now()
        ended_at = now if is_terminal(state) else None
        started_at = now if state == "starting" else record.started_at
        self._database.execute(
            "UPDATE jobs SET state=?, reason=?, started_at=?, ended_at=? WHERE job_id=?",
            (state, reason, started_at, ended_at, job_id),
        )
        if ended_at is not None:
            after = f"after {now - started_at:.1f} s" if started_at is not None else "before it began"
            _log.info("job %s %s %s%s", job_id, state, after, f": {reason}" if reason else "")
        self._insert(job_id, "state", {"state": state, "reason": reason, "error": error})

    def update(self, job_id: str, **facts: Any) -> None:
        """Set some of the columns that describe how far a job is."""
        if unknown := set(facts) - set(_FACTS):
            raise UsageError(f"Job facts: expected {', '.join(_FACTS)}. Received: {', '.join(sorted(unknown))}.")
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
            database.execute("DELETE FROM jobs WHERE job_id=?", (job_id,))
            database.execute("DELETE FROM events WHERE job_id=?", (job_id,))

    def append(self, job_id: str, kind: EventKind, data: dict[str, Any]) -> Event:
        """Add an event; an epoch's end also deletes old progress events of the epoch before."""
        with self._transaction():
            event = self._insert(job_id, kind, data)
            if kind == "epoch_end":
                self._thin(job_id, event.cursor)
        return event

    def _insert(self, job_id: str, kind: EventKind, data: dict[str, Any]) -> Event:
        last = self._database.execute("SELECT MAX(cursor) FROM events WHERE job_id=?", (job_id,)).fetchone()[0]
        event = Event((last or 0) + 1, self._now(), kind, data)
        self._database.execute(
            "INSERT INTO events VALUES (?,?,?,?,?)", (job_id, event.cursor, event.at, kind, json.dumps(data))
        )
        return event

    def _thin(self, job_id: str, end: int) -> None:
        """Keep only the last progress event of the epoch before the one that ended at ``end``."""
        ends = self._database.execute(
            "SELECT cursor FROM events WHERE job_id=? AND kind='epoch_end' AND cursor<? ORDER BY cursor DESC LIMIT 2",
            (job_id, end),
        ).fetchall()
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
        with self._using() as database:
            rows = database.execute(
                "SELECT * FROM events WHERE job_id=? AND cursor>? ORDER BY cursor LIMIT ?", (job_id, after, limit)
            ).fetchall()
        return [Event(r["cursor"], r["at"], r["kind"], json.loads(r["data_json"])) for r in rows]

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

    def requeue(self, job_id: str, reason: str, spec_json: str = "") -> None:
        """Queue a job again that an earlier server began; ``spec_json``: its specification from now on."""
        with self._transaction(durable=True) as database:
            database.execute(
                "UPDATE jobs SET state='queued', started_at=NULL, spec_json=? WHERE job_id=?",
                (spec_json or self.get(job_id).spec_json, job_id),
            )
            self._insert(job_id, "state", {"state": "queued", "reason": reason, "error": None})

    def restarts(self, job_id: str) -> int:
        """Return how often a job was queued again since the last end of an epoch."""
        with self._using() as database:
            return int(
                database.execute(
                    "SELECT COUNT(*) FROM events WHERE job_id=:job AND kind='state' AND data_json LIKE :restarted "
                    "AND cursor > (SELECT COALESCE(MAX(cursor), 0) FROM events WHERE job_id=:job AND kind='epoch_end')",
                    {"job": job_id, "restarted": f"%{RESTARTED}%"},
                ).fetchone()[0]
            )
