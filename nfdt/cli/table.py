"""Text tables for the terminal, among them the statistics of a job's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nfdt.core.work.statistics import split_by_rank

WORKER_COLUMNS = ("worker", "samples", "steps", "samples/s", "staleness", "max", "sent", "received")


def render(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Render columns of text: the first ``left`` columns left-aligned, the others right-aligned.

    >>> print(render(("name", "n"), [("a", "10")]))
    name   n
    a     10
    """
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def count_of(count: int, noun: str) -> str:
    """Return a number and its noun.

    >>> count_of(1, "worker"), count_of(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Format a number of bytes as in ``1.5 MB``: decimal units, one digit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _worker_row(name: str, statistics: Mapping[str, Any]) -> tuple[str, ...]:
    staleness = {int(tau): int(count) for tau, count in statistics.get("staleness", {}).items()}
    pushes = sum(staleness.values())
    mean = f"{sum(tau * n for tau, n in staleness.items()) / pushes:.2f}" if pushes else "-"
    seconds = float(statistics.get("seconds", 0.0))
    samples = int(statistics.get("samples", 0))
    return (
        name,
        str(samples),
        str(statistics.get("steps", 0)),
        f"{samples / seconds:.0f}" if seconds else "-",
        mean,
        str(max(staleness)) if staleness else "-",
        format_bytes(statistics.get("bytes_sent", 0)),
        format_bytes(statistics.get("bytes_received", 0)),
    )


def worker_table(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """Render ``history.nfdt`` as a table: one line per worker or rank; staleness is the mean, then the maximum."""
    rows = split_by_rank(workers)
    return render(WORKER_COLUMNS, [_worker_row(name, rows[name]) for name in sorted(rows)])
