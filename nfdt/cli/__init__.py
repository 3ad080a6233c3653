"""The command line: ``nfdt`` and ``hfdt``. Commands parse their options and call the module that does the work."""

from __future__ import annotations

import click

import nfdt
from nfdt.cli.certs import certs
from nfdt.cli.chaos import chaos
from nfdt.cli.config import config
from nfdt.cli.doctor import doctor
from nfdt.cli.errors import Commands
from nfdt.cli.health import health
from nfdt.cli.hfdt import hfdt
from nfdt.cli.jobs import jobs
from nfdt.cli.kubernetes import kubernetes
from nfdt.cli.mpi import mpi
from nfdt.cli.plan import plan
from nfdt.cli.run import run
from nfdt.cli.serve import server, worker
from nfdt.cli.simulate import simulate
from nfdt.cli.submit import submit
from nfdt.cli.workers import workers


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(nfdt.__version__, prog_name="nfdt")
def cli() -> None:
    """Train unmodified Keras 3 scripts on many workers.

    Exit codes: 0 ok, 1 the script failed, 2 usage, 3 the job failed remotely, 4 server unreachable,
    5 refused, 6 cancelled, 130 interrupted.
    """


COMMANDS = (
    *(run, server, worker, workers, mpi, submit, jobs, simulate, plan, doctor, health, kubernetes, config, certs),
    chaos,
)
for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    """Run ``nfdt``; its entry point."""
    cli(prog_name="nfdt")


def hfdt_main() -> None:
    """Run ``hfdt``; its entry point."""
    hfdt(prog_name="hfdt")
