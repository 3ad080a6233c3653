"""SQLite database of jobs and events: its tables, and those of earlier versions brought up to date."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

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
    database.execute(_NAMES)
    return database
