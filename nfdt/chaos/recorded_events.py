"""Events of the jobs of a server, read from its state directory: also while the server is stopped or away.

A connection to the server would count as a client that watches the job.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUSY_S = 1.0


@dataclass(frozen=True)
class RecordedEvent:
    """One event of a job; ``at`` is Unix time in seconds."""

    at: float
    kind: str
    data: dict[str, Any]


@dataclass
class RecordedJob:
    """A job as far as it has been read.

    Attributes:
        job_id: The job.
        samples: Number of samples of one epoch; None where the specification does not determine it.
        events: Its events so far.
        state: Its last state.
        cursor: Number of the last event.
    """

    job_id: str
    samples: int | None
    events: list[RecordedEvent] = field(default_factory=list)
    state: str = "queued"
    cursor: int = 0


class RecordedJobs:
    """Reader of the jobs of one state directory.

    Args:
        state_dir: The directory; the server may not have made it yet.

    Attributes:
        jobs: All jobs so far, oldest first.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "jobs.sqlite"
        self.jobs: list[RecordedJob] = []

    def read(self) -> bool:
        """Add what is new; return whether there was anything. A file that cannot be read now has no news."""
        if not self._path.exists():
            return False
        with contextlib.suppress(sqlite3.Error):
            with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", BUSY_S, uri=True)) as database:
                return self._read(database)
        return False

    def _read(self, database: sqlite3.Connection) -> bool:
        known = {job.job_id for job in self.jobs}
        for job_id, spec in database.execute("SELECT job_id, spec_json FROM jobs ORDER BY submitted_at"):
            if job_id not in known:
                self.jobs.append(RecordedJob(job_id, samples_of_epoch(json.loads(spec))))
        count = sum(len(job.events) for job in self.jobs)
        for job in self.jobs:
            rows = "SELECT cursor, at, kind, data_json FROM events WHERE job_id = ? AND cursor > ? ORDER BY cursor"
            for cursor, at, kind, data in database.execute(rows, (job.job_id, job.cursor)):
                event = RecordedEvent(at, kind, json.loads(data))
                job.cursor = cursor
                job.events.append(event)
                job.state = str(event.data["state"]) if kind == "state" else job.state
        return sum(len(job.events) for job in self.jobs) > count


def samples_of_epoch(spec: dict[str, Any]) -> int | None:
    """Return the samples of an epoch of a job's specification; None where it does not determine them."""
    if spec["train"]["kind"] != "arrays" or spec["fit"].get("steps_per_epoch") is not None:
        return None
    samples: int | None = spec["train"]["samples"]
    return samples
