"""Log of the phases of a start, written by all its processes to one file; for measurements."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "NFDT_START_LOG"


@dataclass(frozen=True)
class StartPhase:
    """One phase that a process has reached.

    Attributes:
        at: Seconds since the epoch.
        cpu_s: Processor time of the process so far, in seconds; that of a forked process begins at the fork.
        process: Name of the process.
        phase: What it has done.
    """

    at: float
    cpu_s: float
    process: str
    phase: str


def note_start(process: str, phase: str) -> None:
    """Append a phase to the file that NFDT_START_LOG names; do nothing without that variable.

    Args:
        process: Name of this process, as in ``worker-0``.
        phase: What it has just done.
    """
    if path := os.environ.get(VARIABLE):
        line = json.dumps(asdict(StartPhase(time.time(), time.process_time(), process, phase))) + "\n"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line.encode())  # one write: lines of several processes do not mix
        finally:
            os.close(file)


def read_start_log(path: Path) -> Sequence[StartPhase]:
    """Return the phases in a file, by time."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted((StartPhase(**json.loads(line)) for line in lines), key=lambda phase: phase.at)
