"""``nfdt run``: an unmodified script, trained on workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import click
from nfdt_client.decorator import session
from nfdt_client.session import Session

from nfdt.cli.options import log_to_stderr, parse_settings, server_options, training_options
from nfdt.cli.quiet import quiet_start
from nfdt.cli.script import describe_failure, exit_code_of, run_script
from nfdt.cli.table import worker_table
from nfdt.core.imports import quick_imports

SCRIPT_ARGUMENTS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def print_workers(fits: Sequence[Mapping[str, Any]]) -> None:
    """One table per captured ``fit`` on stderr: what each worker did."""
    for number, workers in enumerate(fits, start=1):
        if len(fits) > 1:
            click.echo(f"fit {number} of {len(fits)}", err=True)
        click.echo(worker_table(workers), err=True)


def train_script(context: click.Context, script: Path, args: Sequence[str], opened: Session) -> None:
    """Run ``script`` inside ``opened`` and end the command with the exit code that tells how it went."""
    try:
        with ExitStack() as stack:
            shown = logging.getLogger().isEnabledFor(logging.DEBUG)
            with nullcontext() if shown else quiet_start(), quick_imports():
                stack.enter_context(opened)
            run_script(script, args)
    except BaseException as error:  # SystemExit and KeyboardInterrupt have exit codes of their own
        if message := describe_failure(error, script):
            click.echo(message, err=True)
        context.exit(exit_code_of(error))
    finally:
        print_workers([workers for workers in opened.fits if workers])


@click.command(context_settings=SCRIPT_ARGUMENTS)
@click.option("--workers", metavar="N", help="How many workers train.")
@training_options
@server_options
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    script: Path,
    args: tuple[str, ...],
    settings: tuple[str, ...],
    log_level: str,
    **options: str | None,
) -> None:
    """Run SCRIPT unmodified; every model.fit in it trains on workers.

    Without --server, a job server and its workers are started here and taken down at the end.
    """
    log_to_stderr(log_level)
    train_script(context, script, args, session(options={**options, **parse_settings(settings)}))
