"""Text tables for the terminal, among them the statistics of a job's workers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nfdt.core.work.statistics import split_by_rank

if TYPE_CHECKING:
    from nfdt_client.handle import JobStatus
    from rich.table import Table

WORKER_COLUMNS = ("worker", "samples", "steps", "samples/s", "staleness", "max", "sent", "received")
ANY_WIDTH = 10**6  # of text that may go to a file: no cell is cut off


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]] = (), *, left: int = 1) -> Table:
    """Return a table without lines: the first ``left`` columns left-aligned, the others right-aligned."""
    from rich.table import Table  # takes longer to import than the help of a command

    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def state_of(status: JobStatus) -> str:
    """Return a job's state, with its place in the queue and the estimate of its start if it waits."""
    if not status.place:
        return status.state
    seconds = status.starts_in_s
    about = "" if seconds is None else f"{round(seconds)} s" if seconds < 100 else f"{round(seconds / 60)} min"
    return f"{status.state} ({status.place} in queue{about and f', in about {about}'})"


def render(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Render :func:`make_table` as plain text.

    >>> print(render(("name", "n"), [("a", "10")]))
    name   n
    a     10
    """
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=ANY_WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(make_table(columns, rows, left=left))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


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


def mean_staleness(statistics: Mapping[str, Any], digits: int) -> str:
    """Format the mean staleness of a worker's pushes, ``-`` without any."""
    staleness = statistics.get("staleness", {})
    pushes = sum(map(int, staleness.values()))
    return f"{sum(int(tau) * int(n) for tau, n in staleness.items()) / pushes:.{digits}f}" if pushes else "-"


def worker_table(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """Render ``history.nfdt`` as a table: one line per worker or rank; staleness is the mean, then the maximum."""
    return render(WORKER_COLUMNS, [_worker_row(*each) for each in sorted(split_by_rank(workers).items())])


def _worker_row(name: str, statistics: Mapping[str, Any]) -> tuple[str, ...]:
    seconds, samples = float(statistics.get("seconds", 0.0)), int(statistics.get("samples", 0))
    return (
        name,
        str(samples),
        str(statistics.get("steps", 0)),
        f"{samples / seconds:.0f}" if seconds else "-",
        mean_staleness(statistics, 2),
        str(max(map(int, statistics.get("staleness", {})), default="-")),
        # Horovod counts no bytes.
        *(format_bytes(statistics[key]) if key in statistics else "-" for key in ("bytes_sent", "bytes_received")),
    )
