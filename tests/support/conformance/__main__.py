"""``scripts/conformance``: suites of others, plain and distributed, as a table."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tests.support.conformance import horovod_suite, keras_suite, script_suite
from tests.support.conformance.verdicts import Row, table


@click.group()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="File for the rows.")
@click.pass_context
def main(context: click.Context, json_file: Path | None) -> None:
    """Run tests and scripts of others, plain and distributed, and print which pass, are refused, or are wrong."""
    context.obj = json_file


@main.command()
@click.option("--checkout", type=click.Path(path_type=Path, exists=True), help="Folder of the package; installed one.")
@click.option("--packages", type=click.Path(path_type=Path), required=True, help="Packages that only the tests import.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="Further option of the sessions.")
@click.argument("suites", nargs=-1, type=click.Choice(list(keras_suite.SUITES)))
@click.pass_obj
def keras(
    json_file: Path | None,
    checkout: Path | None,
    packages: Path,
    workers: int,
    options: tuple[str, ...],
    suites: tuple[str, ...],
) -> None:
    """Run Keras' own tests of fit and callbacks; by default both."""
    given = dict(option.split("=", 1) for option in options)
    folder = checkout or keras_suite.installed()
    for suite in suites or tuple(keras_suite.SUITES):
        rows = keras_suite.run(suite, folder.resolve(), workers, packages.resolve(), given)
        _finish(f"keras {suite}", rows, json_file)


@main.command()
@click.option("--packages", type=click.Path(path_type=Path), required=True, help="Packages that only the tests import.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True)
@click.argument("checkout", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.pass_obj
def horovod(json_file: Path | None, packages: Path, ranks: int, checkout: Path) -> None:
    """Run Horovod's tests of its Keras wrapper, from a checkout, against hfdt.keras."""
    title = f"horovod on {ranks} rank{'s' * (ranks > 1)}"
    _finish(title, horovod_suite.run(checkout.resolve(), ranks, packages.resolve()), json_file)


@main.command()
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--deadline", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds for one run.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.pass_obj
def examples(json_file: Path | None, workers: int, deadline: float, folder: Path) -> None:
    """Run the scripts of a folder that call fit."""
    _finish(f"scripts of {folder.name}", script_suite.run(folder.resolve(), workers, deadline), json_file)


def _finish(title: str, rows: list[Row], json_file: Path | None) -> None:
    click.echo(table(title, rows))
    if json_file is not None:
        with json_file.open("a") as file:
            file.writelines(json.dumps({"suite": title, **row.as_json()}) + "\n" for row in rows)


if __name__ == "__main__":
    main(prog_name="scripts/conformance")
