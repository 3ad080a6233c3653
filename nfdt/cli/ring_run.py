"""``hfdt run``: an unmodified script, trained on the ranks of an allreduce ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from nfdt.cli.options import (
    ScriptCommand,
    log_to_stderr,
    parse_settings,
    script_argument,
    server_options,
    training_options,
)
from nfdt.cli.run import train_script
from nfdt.cli.script import Script

_CliCommand = TypeVar("_CliCommand", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--fusion-threshold-mb", metavar="MIB", help="Reduce small tensors together up to this size."),
    click.option("--cycle-time-ms", metavar="MS", help="How often Horovod looks for tensors to reduce."),
    click.option("--autotune", is_flag=True, default=None, help="Let Horovod search for both."),
    click.option("--autotune-log-file", "autotune_log", metavar="FILE", help="CSV file of what autotune tried."),
    click.option("--timeline-filename", "timeline", metavar="FILE", help="Trace of all reductions, for Perfetto."),
    click.option(
        "--stall-check-warning-time-seconds", "stall_warning_s", metavar="S", help="Name ranks that are that late."
    ),
    click.option("--stall-check-shutdown-time-seconds", "stall_shutdown_s", metavar="S", help="End the ring then."),
    click.option("--min-np", "min_workers", metavar="N", help="Elastic: go on when ranks die, down to N."),
    click.option("--max-np", "max_workers", metavar="N", help="Elastic: take more ranks, up to N."),
    click.option(
        "--host-discovery-script", metavar="FILE", help="Elastic: a program that prints the hosts there are, a:2 each."
    ),
    click.option("--commit-steps", metavar="N", help="Elastic: copy the state every N steps."),
    click.option("--elastic-timeout", "elastic_timeout_s", metavar="S", help="Elastic: wait that long for N ranks."),
    click.option("--reset-limit", metavar="N", help="Elastic: give up when ranks came or went more often."),
)


def ring_options(command: _CliCommand) -> _CliCommand:
    """Add the options for tuning, tracing and elasticity of an allreduce ring."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


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
