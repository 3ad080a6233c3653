"""``nfdt run``: an unmodified script, trained on workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import click
from nfdt_client.decorator import session
from nfdt_client.session import Session

from nfdt.cli.options import (
    ScriptCommand,
    log_to_stderr,
    parse_settings,
    script_argument,
    server_options,
    training_options,
)
from nfdt.cli.quiet import quiet_start
from nfdt.cli.script import Script, describe_failure, exit_code_of, run_script
from nfdt.cli.table import worker_table
from nfdt.core.host.fast_imports import quick_imports


def print_workers(fits: Sequence[Mapping[str, Any]]) -> None:
    """Print one table of worker statistics per captured ``fit`` to stderr."""
    for number, workers in enumerate(fits, start=1):
        if len(fits) > 1:
            click.echo(f"fit {number} of {len(fits)}", err=True)
        click.echo(worker_table(workers), err=True)


def train_script(context: click.Context, script: Script, opened: Session) -> None:
    """Run ``script`` inside ``opened`` and end the command with the exit code of the outcome."""
    try:
        with ExitStack() as stack:
            shown = logging.getLogger().isEnabledFor(logging.DEBUG)
            with nullcontext() if shown else quiet_start(), quick_imports():
                stack.enter_context(opened)
            run_script(script)
    except BaseException as error:  # SystemExit and KeyboardInterrupt have exit codes of their own
        if message := describe_failure(error):
            click.echo(message, err=True)
        context.exit(exit_code_of(error))
    finally:
        print_workers([workers for workers in opened.fits if workers])


@click.command(cls=ScriptCommand)
@click.option("--workers", metavar="N", help="How many workers train.")
@training_options
@server_options
@script_argument()
@click.pass_context
def run(
    context: click.Context,
    script: Script,
    settings: tuple[str, ...],
    log_level: str,
    **options: str | None,
) -> None:
    """Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on workers.

    Without --server, a job server and its workers are started here and taken down at the end.
    """
    log_to_stderr(log_level)
    train_script(context, script, session(options={**options, **parse_settings(settings)}))
