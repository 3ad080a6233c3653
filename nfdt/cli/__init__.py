"""The command line: ``nfdt`` and ``hfdt``. Commands parse their options and call the module that does the work.

A command is imported when it runs: the help of a group needs none of them. An NFDT error of a command becomes one
message on stderr and its exit code.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

import nfdt
from nfdt.cli.script import INTERRUPTED
from nfdt.core.errors import NfdtError, similar
from nfdt.core.host.startup import quiet_grpc


class WholeSentences(click.Group):
    """A group whose help has the whole first sentence of each command's help, under the command's heading.

    An error about an unknown command names those that are similar.
    """

    headings: Mapping[str, Sequence[str]] = {}
    """Names of the commands under each heading; without any, all are under one."""

    def summary_of(self, ctx: click.Context, name: str) -> str:
        """Return the first sentence of a command's help."""
        command = self.get_command(ctx, name)
        assert command is not None
        return command.get_short_help_str(MAX_SENTENCE)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; an error names those that are similar."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}.{similar(args[0], names)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their summaries."""
        names = self.list_commands(ctx)
        widest = max(map(len, names))
        for heading, under in (self.headings or {"Commands": names}).items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), self.summary_of(ctx, name)) for name in under])


class LazyCommands(WholeSentences):
    """A group whose commands are imported when they run, or are asked for their own help.

    NFDT errors and interrupts become messages and exit codes.

    Args:
        *args: Arguments of ``click.Group``.
        homes: ``MODULE:ATTRIBUTE`` of each command.
        summaries: First sentence of each command's help, for the group's help.
        headings: As for :class:`WholeSentences`.
        **kwargs: Arguments of ``click.Group``.
    """

    def __init__(
        self,
        *args: Any,
        homes: Mapping[str, str],
        summaries: Mapping[str, str],
        headings: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._homes, self._summaries, self.headings = homes, summaries, headings or {}

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        quiet_grpc()
        try:
            return super().invoke(ctx)
        except NfdtError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return sorted(self._homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in self._homes:
            return None
        module, attribute = self._homes[cmd_name].split(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def summary_of(self, ctx: click.Context, name: str) -> str:
        """Return the first sentence of a command's help without importing it."""
        return self._summaries[name]


MAX_SENTENCE = 1000  # characters
SUMMARIES = {
    "certs": "Make certificates for a server that is reached as --host, and for its clients.",
    "chaos": "Run SCRIPT on a cluster of this machine, inject the faults of SCHEDULE, and report what became of each.",
    "config": "Print every option, its value and where it came from.",
    "doctor": "Say what works on this machine, and what to do about the rest (exit code 1 if training cannot work).",
    "health": "Ask a job server whether it serves; needs no token.",
    "jobs": "List and inspect jobs, follow their logs, fetch results, cancel, resume, delete.",
    "kubernetes": "Write the manifests of a job server and its workers, for `kubectl apply -f`.",
    "mpi": "Run SCRIPT, or with -m a module, under mpirun or srun: rank 0 serves and runs it, every other rank is a "
    "worker.",
    "parity": "Train SCRIPT plain and distributed with the same seeds, and compare the results of its last model.fit.",
    "plan": "Predict how much faster than plain Keras each algorithm would train SCRIPT, and say which to take.",
    "run": "Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on workers.",
    "runs": "List, show and compare the fits of this user on this machine, also those that have ended.",
    "server": "Serve jobs until interrupted; prints `listening on HOST:PORT` once it answers.",
    "simulate": "Run SCRIPT unmodified, once per algorithm, on a cluster that is only described.",
    "start": "Keep a warm server on this machine: scripts that start a server of their own begin to train sooner.",
    "stop": "End the warm server of nfdt start, with the runs that use it.",
    "submit": "Train SCRIPT, or with -m a module, in a batch job: srun starts nfdt mpi on every node.",
    "top": "Show live what the workers of a job do: samples per second, staleness, computation, exchange, traffic.",
    "trace": "Write when each process of a job computed, exchanged and waited; https://ui.perfetto.dev shows the file.",
    "ui": "Open the page of a server, or of one of its jobs, in a browser, and print the link, which opens it once.",
    "worker": "Offer slots of this machine to a job server: --slots for workers, --shards for parts of the weights.",
    "workers": "List the machines of a server: their slots, roles, versions, and the jobs that use them.",
}
"""First sentence of the help of each command of ``nfdt``."""
HFDT_SUMMARIES = {
    "doctor": SUMMARIES["doctor"],
    "run": "Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on the ranks of one allreduce "
    "ring.",
}
"""First sentence of the help of each command of ``hfdt``."""
HEADINGS = {
    "Train": ("run", "mpi", "submit"),
    "Watch": ("top", "jobs", "runs", "trace", "ui"),
    "Predict and compare": ("plan", "simulate", "parity"),
    "Serve": ("start", "stop", "server", "worker", "workers", "health", "certs", "kubernetes"),
    "Check": ("doctor", "config", "chaos"),
}
"""Commands of ``nfdt`` under each heading of its help."""
_HOMES = {"server": "serve", "stop": "start", "worker": "serve"}
_SETTINGS = {"help_option_names": ["-h", "--help"]}


@click.group(
    cls=LazyCommands,
    homes={name: f"nfdt.cli.{_HOMES.get(name, name)}:{name}" for name in SUMMARIES},
    summaries=SUMMARIES,
    headings=HEADINGS,
    context_settings=_SETTINGS,
)
@click.version_option(nfdt.__version__, prog_name="nfdt")
def cli() -> None:
    """Train unmodified Keras 3 scripts on many workers.

    Exit codes: 0 ok, 1 the script failed, 2 usage, 3 the job failed remotely, 4 server unreachable,
    5 refused, 6 cancelled, 130 interrupted.
    """


@click.group(
    cls=LazyCommands,
    homes={"run": "nfdt.cli.run:hfdt_run", "doctor": "nfdt.cli.doctor:doctor"},
    summaries=HFDT_SUMMARIES,
    context_settings=_SETTINGS,
)
@click.version_option(nfdt.__version__, prog_name="hfdt")
def hfdt() -> None:
    """Train unmodified Keras 3 scripts on Horovod allreduce.

    Exit codes: 0 ok, 1 the script failed, 2 usage, 3 the job failed, 4 server unreachable, 5 refused,
    6 cancelled, 130 interrupted.
    """


def main() -> None:
    """Run ``nfdt``; its entry point."""
    cli(prog_name="nfdt")


def hfdt_main() -> None:
    """Run ``hfdt``; its entry point."""
    hfdt(prog_name="hfdt")
