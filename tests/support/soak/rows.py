"""Rows of a soak's files, and their sums over several soaks. Pure but for reading the files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from nfdt.chaos.report import ChaosReport
from nfdt.cli.table import render
from tests.support.soak.draw import SoakJob

FAULTS, JOBS, UNDISTURBED = "faults.jsonl", "jobs.jsonl", "undisturbed.jsonl"
COLUMNS = ("fault", "role", "injected", "survived", "median s", "worst s", "too late")
Row = Mapping[str, Any]


def fault_rows(seed: int, job: SoakJob, report: ChaosReport) -> list[Row]:
    """Return a row for each fault of a job."""
    facts = {"seed": seed, "job": job.number, "preset": job.preset}
    return [{**facts, **fault} for fault in report.as_json()["faults"]]


def read_rows(folders: Iterable[Path], name: str) -> list[Row]:
    """Return the rows of one file of several soaks."""
    files = [folder / name for folder in folders]
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


def summarise(faults: Sequence[Row], jobs: Sequence[Row]) -> str:
    """Return the table of a soak, and the violations of its jobs."""
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in faults:
        pairs.setdefault((row["kind"], row["role"]), []).append(row)
    table = render(COLUMNS, [_line(*pair, pairs[pair]) for pair in sorted(pairs)], left=2)
    injected = [row for row in faults if row["survived"] is not None]
    survived = sum(bool(row["survived"]) for row in injected)
    broken = [job for job in jobs if job["violations"]]
    lines = [table, f"{len(jobs)} jobs, {len(broken)} with violations; {survived} of {len(injected)} faults survived"]
    for job in broken:
        where = f"job {job['job']} of seed {job['seed']} ({job['preset']})"
        lines += [f"{where}: {one.splitlines()[0]}" for one in job["violations"]]
    return "\n".join(lines)


def _line(kind: str, role: str, rows: Sequence[Row]) -> tuple[str, ...]:
    injected = [row for row in rows if row["survived"] is not None]
    times = [row["recovery_s"] for row in injected if row["recovery_s"] is not None]
    survived = sum(bool(row["survived"]) for row in injected)
    seconds = (f"{median(times):.1f}", f"{max(times):.1f}") if times else ("-", "-")
    return (kind, role, str(len(injected)), str(survived), *seconds, str(len(rows) - len(injected)))
