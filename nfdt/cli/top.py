"""``nfdt top``: a live table of a server's jobs and of one job's workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import click
from nfdt_client.connection import JobsClient
from nfdt_client.handle import JobStatus, describe_log, status_of
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nfdt.cli.options import with_job_id
from nfdt.cli.table import count_of, format_bytes, make_table, mean_staleness, state_of
from nfdt.core.work.statistics import split_by_rank

INTERVAL_S = 1.0
COLUMNS = ("worker", "samples/s", "batch", "stale", "compute", "exchange", "wait", "sent", "received")
MOST_WORKERS = 32  # rows of workers; the others are one row

_RATES = ("samples", "compute_s", "exchange_s", "wait_s", "bytes_sent", "bytes_received")
_Totals = Mapping[str, Mapping[str, Any]]


class JobView:
    """Tables of a job, with the rates of its workers between two looks.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Any = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[float, _Totals] | None = None

    def render(self, status: JobStatus) -> Group:
        """Return the tables of the job's present status."""
        now = self._clock()
        before_at, before = self._before or (now, {})
        seconds, workers = now - before_at, split_by_rank(status.worker_statistics)
        table = make_table(COLUMNS)
        names = sorted(workers, key=lambda name: (len(name), name))
        rates = {name: _rates(workers[name], before.get(name, {}), seconds) for name in names}
        for name in names[:MOST_WORKERS]:
            table.add_row(name, *_cells(workers[name], rates[name]))
        if len(names) > MOST_WORKERS:
            table.add_row(f"{len(names) - MOST_WORKERS} others", _format(_total(rates, names[MOST_WORKERS:]), ".0f"))
        self._before = now, workers
        return Group(_summary(status, _total(rates, names)), table)


def _rates(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Return what a worker did per second since the look before; of the first look nothing is known."""
    if not before or seconds <= 0:
        return {}
    return {key: max(0.0, (now.get(key, 0) or 0) - (before.get(key, 0) or 0)) / seconds for key in _RATES}


def _total(rates: Mapping[str, Mapping[str, float]], names: Iterable[str]) -> float | None:
    """Return the samples per second of these workers as far as they are known; None: of none of them."""
    known = [rates[name]["samples"] for name in names if rates[name]]
    return sum(known) if known else None


def _format(rate: float | None, how: str) -> str:
    return "-" if rate is None else format(rate, how)


def _cells(statistics: Mapping[str, Any], rates: Mapping[str, float]) -> tuple[str, ...]:
    return (
        _format(rates.get("samples"), ".0f"),
        f"{statistics['batch_size']:.0f}" if "batch_size" in statistics else "-",
        mean_staleness(statistics, 1),
        *(f"{100 * min(1.0, rates[key]):.0f} %" if rates else "-" for key in ("compute_s", "exchange_s", "wait_s")),
        *(
            f"{format_bytes(rates[key])}/s" if rates and key in statistics else "-"
            for key in ("bytes_sent", "bytes_received")
        ),
    )


def _summary(status: JobStatus, samples_per_s: float | None) -> Text:
    epoch = min(status.epoch + 1, status.epochs)
    logs = "  ".join(f"{name} {describe_log(value)}" for name, value in status.logs.items())
    text = Text(f"{status.job_id}", style="bold")
    if status.given_name:
        text.append(f" ({status.given_name})")
    text.append(f"  {state_of(status)}", style="green" if status.state in ("running", "succeeded") else "yellow")
    text.append(f"  {status.algorithm} on {count_of(status.workers, 'worker')}  epoch {epoch} of {status.epochs}")
    text.append(f"  {_format(samples_per_s, ',.0f')} samples/s\n{logs}" if logs else "")
    return text


@click.command()
@click.option("--once", is_flag=True, help="Print the table once, without rates, and end.")
@with_job_id
def top(connection: JobsClient, job_id: str, once: bool) -> None:
    """Show live what the workers of a job do: samples per second, staleness, computation, exchange, traffic.

    Without ID it is the job that was submitted last, one that has not ended before others. Ends with the job, or with
    Ctrl-C.
    """
    status, view, console = status_of(connection.show(job_id)), JobView(), Console()
    if once or not console.is_terminal:
        console.print(view.render(status))
        return
    with Live(view.render(status), console=console, auto_refresh=False) as live:
        while not status.ended:
            time.sleep(INTERVAL_S)
            status = status_of(connection.show(status.job_id))
            live.update(view.render(status), refresh=True)
