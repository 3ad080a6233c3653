"""``nfdt plan``: what each algorithm would do on a described cluster, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from nfdt.cli.options import parse_settings
from nfdt.cli.quiet import quiet_start
from nfdt.cli.run import SCRIPT_ARGUMENTS
from nfdt.cli.script import describe_failure, exit_code_of
from nfdt.cli.table import render
from nfdt.core.errors import UsageError
from nfdt.core.presets import PRESETS
from nfdt.planning.forecast import Forecast, forecast, recommend
from nfdt.simulate.cluster import read_cluster
from nfdt.simulate.costs import costs_of

COLUMNS = ("algorithm", "samples/s", "s per epoch", "staleness", "max", "samples needed")


@click.command(context_settings=SCRIPT_ARGUMENTS)
@click.option("--cluster", "file", required=True, type=click.Path(path_type=Path), help="What it is like: TOML.")
@click.option("--algorithm", "algorithms", default=",".join(PRESETS), metavar="A[,B...]", help="Presets; all of them.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other option; repeatable.")
@click.option("--format", "format_", type=click.Choice(["text", "json"]), default="text", help="How to print.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def plan(
    context: click.Context,
    file: Path,
    algorithms: str,
    settings: tuple[str, ...],
    format_: str,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Predict what each algorithm would do with SCRIPT on a described cluster, and say which to take and why.

    SCRIPT runs up to its first model.fit, which tells batch size, samples and the model's size; nothing is trained.
    """
    cluster = read_cluster(file)
    from nfdt_client.options import resolve

    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    options = [resolve({**parse_settings(settings), "algorithm": name}) for name in names]
    try:
        with quiet_start():
            from nfdt.cli.simulated import first_fit

        work = first_fit(script, args, options[0])
    except BaseException as error:  # as in nfdt run
        if message := describe_failure(error, script):
            click.echo(message, err=True)
        context.exit(exit_code_of(error))
    if work is None:
        raise UsageError(f"{script}: expected a script that calls model.fit. It ended without.")
    costs = costs_of(cluster, work.batch_size, work.weights)
    forecasts = [forecast(each.algorithm, costs, work.samples) for each in options]
    best, reason = recommend(forecasts)
    if format_ == "json":
        told: dict[str, Any] = {"work": asdict(work), "forecasts": [asdict(f) for f in forecasts]}
        click.echo(json.dumps({**told, "recommended": best.algorithm, "reason": reason}, indent=2))
        return
    click.echo(f"{work.weights:,} weights, {work.samples:,} samples per epoch, batches of {work.batch_size}")
    click.echo(render(COLUMNS, _rows(forecasts)))
    click.echo(f"take {reason}")


def _rows(forecasts: Sequence[Forecast]) -> list[tuple[str, ...]]:
    return [
        (
            each.algorithm,
            f"{each.samples_per_s:,.0f}",
            f"{each.epoch_s:.2f}",
            f"{each.staleness:.1f}",
            f"{each.most_staleness:.1f}",
            f"x{each.samples_factor:.2f}" if each.samples_factor else "unknown",
        )
        for each in forecasts
    ]
