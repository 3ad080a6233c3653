"""A job as it is stored, its states with their transitions, and the SQLite database of jobs and events.

::

    queued ──> starting ──> running ──> succeeded
       │          │            ├──────> failed
       └──────────┴────────────┴──────> cancelled, failed

The columns of the table of jobs are the fields of :class:`JobRecord`.
A database of an earlier version gets those that it lacks when it is opened.
"""

from __future__ import annotations

import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nfdt.core.errors import UsageError

JobState = Literal["queued", "starting", "running", "succeeded", "failed", "cancelled"]

TRANSITIONS: dict[JobState, tuple[JobState, ...]] = {
    "queued": ("starting", "failed", "cancelled"),
    "starting": ("running", "failed", "cancelled"),
    "running": ("succeeded", "failed", "cancelled"),
    "succeeded": (),
    "failed": (),
    "cancelled": (),
}

TERMINAL: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
ACTIVE: tuple[JobState, ...] = ("queued", "starting", "running")

RESTARTED = "server restarted"


def is_terminal(state: str) -> bool:
    """Return whether a job in this state has ended."""
    return state in TERMINAL


def check_transition(job_id: str, old: JobState, new: JobState) -> None:
    """Raise UsageError unless a job may go from ``old`` to ``new``."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(TRANSITIONS[old]) or "nothing, it has ended"
        raise UsageError(f"Job {job_id} is {old}. Expected next: {allowed}. Received: {new}.")


@dataclass(frozen=True)
class JobRecord:
    """One row: the current state of a job. Times are Unix seconds.

    Attributes:
        checkpoint_epochs: Number of epochs whose training ``checkpoint_artifact`` contains.
        snapshot_artifact: State of the shards in the middle of an epoch.
        snapshot_json: The part of the epoch that it contains, an ``EpochProgress``.
        name: Name that its client gave to it, unique among those of the owner; None: none, or a later job has it.
        identity_json: Description of the program that was submitted with the name; see ``names.py``.
        callbacks_json: Callbacks of a detached job after ``checkpoint_epochs`` epochs, a ``CallbacksSpec``.
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
    snapshot_artifact: str | None
    snapshot_json: str | None
    name: str | None
    identity_json: str | None
    callbacks_json: str | None

    @property
    def states(self) -> set[str]:
        """Names of all artifacts that hold states of the job."""
        records = json.loads(self.snapshot_json).get("records") if self.snapshot_json else None
        names = (self.result_artifact, self.checkpoint_artifact, self.snapshot_artifact, records, *self.kept)
        return {name for name in names if name}

    @property
    def kept(self) -> set[str]:
        """Artifacts of the states that callbacks of the job may restore."""
        return set(json.loads(self.callbacks_json)["kept"].values()) if self.callbacks_json else set()


@dataclass(frozen=True)
class Naming:
    """Name of a new job, and the ended job that had it before.

    Attributes:
        name: The name; None: it has none.
        identity_json: Description of its program.
        before: The job that had the name; "": none had it.
        epochs: Number of epochs of that job with which the new one goes on; their events are copied.
    """

    name: str | None = None
    identity_json: str | None = None
    before: str = ""
    epochs: int = 0


_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  job_id TEXT PRIMARY KEY, spec_json TEXT NOT NULL, session TEXT NOT NULL, owner TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT, submitted_at REAL NOT NULL, ended_at REAL,
  epoch INTEGER NOT NULL DEFAULT 0, last_logs_json TEXT, workers_json TEXT,
  result_artifact TEXT, checkpoint_artifact TEXT, checkpoint_epochs INTEGER, started_at REAL,
  snapshot_artifact TEXT, snapshot_json TEXT, name TEXT, identity_json TEXT, callbacks_json TEXT);
CREATE TABLE IF NOT EXISTS events (
  job_id TEXT NOT NULL, cursor INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, data_json TEXT NOT NULL,
  PRIMARY KEY (job_id, cursor)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spans (
  job_id TEXT NOT NULL, process TEXT NOT NULL, records BLOB NOT NULL, offset_s REAL NOT NULL, error_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS spans_of_jobs ON spans (job_id, process);
"""
_LATER = {  # columns that databases of earlier versions lack
    "checkpoint_epochs": "INTEGER",
    "started_at": "REAL",
    "snapshot_artifact": "TEXT",
    "snapshot_json": "TEXT",
    "name": "TEXT",
    "identity_json": "TEXT",
    "callbacks_json": "TEXT",
}
_NAMES = "CREATE UNIQUE INDEX IF NOT EXISTS names ON jobs (owner, name) WHERE name IS NOT NULL"


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file, for threads that exclude each other; create it with mode 0600 if it does not exist.

    Raises:
        OSError: The file cannot be made or written.
        sqlite3.Error: The file is no database.
    """
    # SQLite would create the file with the permissions of the umask.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    database.row_factory = sqlite3.Row
    # A killed server loses nothing with these; a loss of power may undo the newest commits, unless they are durable.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL"):
        database.execute(f"PRAGMA {pragma}")
    database.executescript(_SCHEMA)
    there = {row["name"] for row in database.execute("PRAGMA table_info(jobs)")}
    for column, kind in _LATER.items():
        if column not in there:
            database.execute(f"ALTER TABLE jobs ADD COLUMN {column} {kind}")
    database.execute(_NAMES)
    return database
