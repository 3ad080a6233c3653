"""The command line: ``nfdt`` and ``hfdt``. Commands only read their options and call the part that does the work."""

from __future__ import annotations

import sys
from typing import Any

import click

import nfdt
from nfdt.cli.config import config
from nfdt.cli.doctor import doctor
from nfdt.cli.jobs import jobs
from nfdt.cli.mpi import mpi
from nfdt.cli.run import run
from nfdt.cli.script import INTERRUPTED
from nfdt.cli.serve import server, worker
from nfdt.core.errors import NfdtError


class _Commands(click.Group):
    """Turns errors of the product into one message on stderr and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NfdtError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(nfdt.__version__, prog_name="nfdt")
def cli() -> None:
    """Train unmodified Keras 3 scripts on many workers.

    Exit codes: 0 ok, 1 the script failed, 2 usage, 3 the job failed remotely, 4 server unreachable,
    5 refused, 6 cancelled, 130 interrupted.
    """


for _command in (run, server, worker, mpi, jobs, doctor, config):
    cli.add_command(_command)


def main() -> None:
    """Entry point of ``nfdt``."""
    cli(prog_name="nfdt")


def hfdt_main() -> None:
    """Entry point of ``hfdt``."""
    click.echo("hfdt comes with Horovod support, which is not part of this version; `nfdt run` trains today.", err=True)
    sys.exit(2)
