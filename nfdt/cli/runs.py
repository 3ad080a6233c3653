"""``nfdt runs``: the runs of this user on this machine, also those whose script and server have ended."""

from __future__ import annotations

import csv
import io
import json
import threading
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import click
from nfdt_client.handle import describe_log
from nfdt_client.run_history import KeptRun, find_run, read_runs, runs_folder

from nfdt.cli import WholeSentences
from nfdt.cli.job_pictures import plot_runs
from nfdt.cli.options import format_option, write_output
from nfdt.cli.table import count_of, render, worker_table
from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_page_packages
from nfdt.core.host.signals import wait_in_main_thread

COLUMNS = ("run", "script", "algorithm", "workers", "epochs", "loss", "samples/s", "duration", "ending")
SHORT = 40  # characters of an ending in the list


@click.group(cls=WholeSentences, invoke_without_command=True)
@click.pass_context
def runs(context: click.Context) -> None:
    """List, show and compare the fits of this user on this machine, also those that have ended.

    Each fit of a script that waits for it is kept, whatever its end. Detached ones (nfdt run --detach) are not: their
    server has them, see nfdt jobs. RUN is the id of a run, or a beginning or an end that no other has.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


def _found(names: Iterable[str]) -> list[KeptRun]:
    kept = read_runs(runs_folder())
    return [find_run(kept, name) for name in names]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _duration(run: KeptRun) -> str:
    return f"{timedelta(seconds=round(run.seconds))}"


def _row(run: KeptRun) -> tuple[str, ...]:
    loss = run.metrics.get("loss")
    ending = run.ending if len(run.ending) <= SHORT else run.ending[: SHORT - 1] + "…"
    return (
        run.id,
        Path(run.script).name or "-",
        run.algorithm,
        str(run.workers),
        str(len(run.epochs)),
        "-" if loss is None else describe_log(loss),
        _number(run.samples_per_s, ".0f"),
        _duration(run),
        ending,
    )


@runs.command("list")
@format_option()
def list_(format_: str = "text") -> None:
    """List the runs, oldest first."""
    kept = read_runs(runs_folder())
    if format_ == "json":
        click.echo(json.dumps([asdict(run) for run in kept], indent=2))
    elif kept:
        click.echo(render(COLUMNS, [_row(run) for run in kept], left=3))
    else:
        click.echo(f"No run is kept in {runs_folder()}.")


@runs.command()
@click.argument("name", metavar="RUN")
@format_option()
def show(name: str, format_: str) -> None:
    """Show one run: what was trained with which versions, the metrics of its epochs, and what each worker did."""
    (run,) = _found([name])
    if format_ == "json":
        click.echo(json.dumps(asdict(run), indent=2))
        return
    facts = _facts(run)
    width = max(map(len, facts))
    parts = ["\n".join(f"{fact:<{width}}  {value}" for fact, value in facts.items())]
    if run.epochs:
        names = list(run.epochs[-1]["logs"])
        rows = [(str(epoch["epoch"] + 1), *_logs(epoch, names)) for epoch in run.epochs]
        parts.append(render(("epoch", *names), rows))
    if run.per_worker:
        parts.append(worker_table(run.per_worker))
    click.echo("\n\n".join(parts))


def _logs(epoch: Any, names: Sequence[str]) -> list[str]:
    return [describe_log(epoch["logs"][name]) if name in epoch["logs"] else "-" for name in names]


def _facts(run: KeptRun) -> dict[str, str]:
    """Return what was trained and how it went, as text by name."""
    words = " ".join(filter(None, [run.script or "-", *map(str, run.arguments)]))
    options = {name: str(value) for name, value in run.options.items() if name not in ("algorithm", "workers")}
    return {
        "started": f"{datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M:%S}",
        "script": words,
        "commit": run.commit or "-",
        "algorithm": f"{run.algorithm}, {count_of(run.workers, 'worker')}",
        "server": run.server or "of the script",
        "jobs": ", ".join(run.jobs) or "-",
        **{f"option {name}": value for name, value in sorted(options.items())},
        "backend": run.versions.get("backend", "-"),
        **{f"version of {name}": value for name, value in run.versions.items() if value and name != "backend"},
        "ending": run.ending + (f" ({run.where}: {run.reason})" if run.reason else ""),
        "epochs": str(len(run.epochs)),
        **{name: describe_log(value) for name, value in run.metrics.items()},
        "duration": _duration(run),
        "samples/s": _number(run.samples_per_s, ".0f"),
        "staleness": _number(run.mean_staleness, ".2f"),
        "worker seconds": f"{run.worker_s:.1f}",
    }


@runs.command()
@click.argument("names", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also draw the metrics: r.png, r.svg or r.pdf.")
@format_option()
def compare(names: tuple[str, ...], output: Path | None, format_: str) -> None:
    """Print what differs between runs, and how each went; --output draws their metrics into one picture."""
    if len(names) < 2:
        raise UsageError("nfdt runs compare: expected two runs or more. Received: one.")
    found = _found(names)
    facts = [_facts(run) for run in found]
    if format_ == "json":
        click.echo(json.dumps({run.id: fact for run, fact in zip(found, facts, strict=True)}, indent=2))
    else:
        rows = [(name, *(each.get(name, "-") for each in facts)) for name in {n: None for each in facts for n in each}]
        differing = [row for row in rows if len(set(row[1:])) > 1]
        click.echo(render(("", *(run.id for run in found)), differing, left=len(found) + 1))
    if output is not None:
        plot_runs(found, output)
        click.echo(f"saved {output}", err=True)


@runs.command()
@click.argument("names", metavar="[RUN]...", nargs=-1)
@click.option("--format", "format_", type=click.Choice(["csv", "json"]), default="csv", show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A file; default: standard output.")
def export(names: tuple[str, ...], format_: str, output: Path | None) -> None:
    """Write runs, by default all: as CSV one line for each epoch, as JSON everything."""
    found = _found(names) if names else read_runs(runs_folder())
    text = json.dumps([asdict(run) for run in found], indent=2) if format_ == "json" else _csv(found)
    if output is None:
        click.echo(text.rstrip("\n"))
        return
    write_output("--output", output, text)
    click.echo(f"saved {output}", err=True)


def _csv(found: Sequence[KeptRun]) -> str:
    """Return a line for each epoch of each run, under the names of all metrics."""
    rows = [
        {
            "run": run.id,
            "script": run.script,
            "algorithm": run.algorithm,
            "workers": run.workers,
            "epoch": epoch["epoch"] + 1,
            "seconds": epoch.get("seconds", ""),
            "samples": epoch.get("samples", ""),
            **epoch["logs"],
        }
        for run in found
        for epoch in run.epochs
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list({name: None for row in rows for name in row}), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@runs.command("open")
@click.option("--no-open", is_flag=True, help="Print the link only.")
@click.argument("names", metavar="[RUN]...", nargs=-1)
def open_(names: tuple[str, ...], no_open: bool) -> None:
    """Serve the page of a job for runs, by default all, until it is interrupted, and open it in a browser.

    It lists and compares them, and shows the metrics and the workers of each. No server is needed.
    """
    require_page_packages("nfdt runs open")
    from nfdt.cli.runs_page import page_of_runs  # imports the web server

    with page_of_runs(_found(names) if names else read_runs(runs_folder())) as link:
        click.echo(link)
        if not no_open:
            webbrowser.open(link)
        click.echo("Serving until Ctrl-C.", err=True)
        wait_in_main_thread(threading.Event())


@runs.command()
@click.argument("names", metavar="RUN...", nargs=-1, required=True)
def delete(names: tuple[str, ...]) -> None:
    """Remove runs from this history."""
    for run in _found(names):
        (runs_folder() / f"{run.id}.json").unlink(missing_ok=True)
        click.echo(f"deleted {run.id}", err=True)
