"""Command-line options of allreduce rings: Horovod's names for options that have other names in the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

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
