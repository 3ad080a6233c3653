"""``scripts/conformance``: suites of others, plain and distributed, as a table."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import click

from nfdt.core.specs.presets import DEFAULT_PRESET
from tests.support import features
from tests.support.conformance import horovod_suite, keras_suite, library_suite, script_suite
from tests.support.conformance.keras_page import PAGE, RECORD, Record, page, versions
from tests.support.conformance.verdicts import Row, table


@click.group()
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="File for the rows.")
@click.pass_context
def main(context: click.Context, json_file: Path | None) -> None:
    """Run tests and scripts of others, plain and distributed, and print which pass, are refused, or are wrong."""
    context.obj = json_file


@main.command()
@click.option("--packages", type=click.Path(path_type=Path), required=True, help="Packages that only the tests import.")
@click.option("--algorithm", "algorithms", multiple=True, default=("bsp", DEFAULT_PRESET), show_default=True)
@click.option("--workers", "counts", type=click.IntRange(1), multiple=True, default=(1, 2), show_default=True)
@click.option(
    "--hooks", type=click.Choice(["exact", "auto"]), multiple=True, default=("exact", "auto"), show_default=True
)
@click.option("--record", is_flag=True, help="Keep the rows beside those of other configurations; write the page.")
@click.option("-k", "expression", default="", help="Expression of pytest that selects some of the tests.")
@click.argument("suites", nargs=-1, type=click.Choice(keras_suite.SUITES))
@click.pass_obj
def keras(
    json_file: Path | None,
    packages: Path,
    algorithms: tuple[str, ...],
    counts: tuple[int, ...],
    hooks: tuple[str, ...],
    record: bool,
    expression: str,
    suites: tuple[str, ...],
) -> None:
    """Run Keras' own tests that call fit: those of callbacks, the others ("fit"), or both.

    Each option may be given several times; all combinations are run. Tests that have run plain for the record are not
    run plain again.
    """
    if record and expression:
        raise click.UsageError("--record: expected all tests of a suite. Received: -k, which leaves some out.")
    suites = suites or keras_suite.SUITES
    here, found = versions(), Record(versions())
    if record and RECORD.exists() and (earlier := Record.read()).versions == here:
        found = earlier
    if missing := [suite for suite in suites if suite not in map(keras_suite.suite_of, found.plain)]:
        found.add_plain(keras_suite.run(missing, keras_suite.PLAIN, packages.resolve(), expression))
    for parts in itertools.product(algorithms, counts, hooks):
        configuration = keras_suite.Configuration(*parts)
        outcomes = keras_suite.run(suites, configuration, packages.resolve(), expression)
        _finish(f"keras {configuration}", found.judge(configuration, outcomes, suites), json_file)
        if record:
            found.write()
            PAGE.write_text(page(found), encoding="utf-8")


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
@click.option("--workers", "counts", type=click.IntRange(1), multiple=True, default=(1, 2), show_default=True)
@click.option("--deadline", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds for one run.")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.pass_obj
def examples(json_file: Path | None, counts: tuple[int, ...], deadline: float, folder: Path) -> None:
    """Run the scripts of a folder that call fit, each time in a copy of the folder.

    Compared are the numbers of epochs, the names in each History and their order, all values of all metrics, and the
    files that a script wrote.
    """
    found: dict[int, list[Row]] = {}
    for workers, row in script_suite.run(folder.resolve(), counts, deadline):
        click.echo(f"{row.name} on {workers}: {row.verdict} {row.line}", err=True)
        found.setdefault(workers, []).append(row)
    for workers, rows in found.items():
        _finish(f"scripts of {folder.name} on {workers} worker{'s' * (workers > 1)}", rows, json_file)


@main.command()
@click.option("--packages", type=click.Path(path_type=Path), required=True, help="Folder with the libraries.")
@click.argument("names", nargs=-1, type=click.Choice([path.stem for path in library_suite.scripts()]))
@click.pass_obj
def libraries(json_file: Path | None, packages: Path, names: tuple[str, ...]) -> None:
    """Run scripts that use libraries on Keras, and keep their rows for docs/what_works.md; by default all.

    Compared are, on one worker exactly, the epochs, the names in each History and their order, and all values.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(packages.resolve()), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(packages.resolve()))  # whose versions the record names
    here = {name.lower(): number for name, number in versions().items()}
    found: dict[int, list[Row]] = {}
    for script in library_suite.scripts(names):
        rows = dict(library_suite.run(script))
        library_suite.add_to_record(script, rows, here)
        for workers, row in rows.items():
            click.echo(f"{script.stem} on {workers}: {row.verdict} {row.line}", err=True)
            found.setdefault(workers, []).append(row)
    for workers, each in found.items():
        _finish(f"libraries on {workers} worker{'s' * (workers > 1)}", each, json_file)
    features.main()


def _finish(title: str, rows: list[Row], json_file: Path | None) -> None:
    click.echo(table(title, rows))
    if json_file is not None:
        with json_file.open("a") as file:
            file.writelines(json.dumps({"suite": title, **row.as_json()}) + "\n" for row in rows)


if __name__ == "__main__":
    main(prog_name="scripts/conformance")
