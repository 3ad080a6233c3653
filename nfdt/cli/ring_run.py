"""``hfdt run``: an unmodified script, trained on the ranks of an allreduce ring."""

from __future__ import annotations

import click

from nfdt.cli.options import (
    ScriptCommand,
    log_to_stderr,
    parse_settings,
    script_argument,
    server_options,
    training_options,
)
from nfdt.cli.ring_options import ring_options
from nfdt.cli.run import train_script
from nfdt.cli.script import Script


@click.command(cls=ScriptCommand)
@click.option("-np", "--workers", "workers", metavar="N", help="How many ranks train.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and how many ranks each takes.")
@click.option("--hostfile", metavar="FILE", help="A file with hosts that the launcher reads.")
@click.option("--launcher", type=click.Choice(["auto", "mpirun", "horovodrun"]), help="auto: mpirun where it exists.")
@ring_options
@training_options("allreduce")
@server_options
@script_argument()
@click.pass_context
def run(
    context: click.Context,
    script: Script,
    settings: tuple[str, ...],
    log_level: str,
    **options: str | bool | None,
) -> None:
    """Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on the ranks of one allreduce ring.

    For example: hfdt run -np 4 train.py. Under mpirun or srun the ranks are those that it started.
    """
    from nfdt_client.decorator import session

    log_to_stderr(log_level)
    chosen = {**options, **parse_settings(settings)}
    train_script(context, script, session(options=chosen, default_algorithm="allreduce"))
