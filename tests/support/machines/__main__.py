"""Several machines on this one, to try a cluster: ``scripts/machines up 4 --rate 1000``."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import click

from tests.support.machines.plan import PREFIX, STATE, RigError, RigPlan, entering, environment
from tests.support.machines.requirements import unavailable
from tests.support.machines.rig import Rig


@click.group(help=__doc__)
def main() -> None:
    """Hold the commands."""


@main.command()
@click.argument("count", type=click.IntRange(1, 250))
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Rate of each link in Mbit/s.")
@click.option("--cpu", type=click.FloatRange(min=0.01), help="Processors that each machine may use, 0.5 for instance.")
def up(count: int, rate: float | None, cpu: float | None) -> None:
    """Make COUNT machines and keep them until Ctrl-C."""
    if reason := unavailable():
        raise click.ClickException(f"machines need network namespaces: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Rig(count, rate_mbit=rate, cpus=cpu) as rig:
            for machine in rig:
                click.echo(f"{machine.name}  {machine.address}  scripts/machines shell {machine.name}")
            click.echo("Ctrl-C removes them and ends all their processes.")
            signal.pause()
    except KeyboardInterrupt:
        pass
    except RigError as error:
        raise click.ClickException(str(error)) from error


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(name: str, command: tuple[str, ...]) -> None:
    """Run COMMAND, or a shell, in the machine NAME; of several with this name, in that of the newest rig."""
    states = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{STATE}"), key=lambda path: path.stat().st_mtime)
    if not states:
        raise click.ClickException("there are no machines: make some with 'scripts/machines up 2'")
    rigs = [RigPlan.parse(path.read_text()) for path in states]
    machines = {machine.name: (rig, machine) for rig in rigs for machine in rig.machines}  # the last one counts
    if name not in machines:
        raise click.ClickException(f"no machine is called {name!r}, the machines are {', '.join(machines)}")
    rig, machine = machines[name]
    words = entering(rig, machine, command or [os.environ.get("SHELL", "sh")], Path.cwd())
    os.execvpe(words[0], words, environment(rig, machine, os.environ))


if __name__ == "__main__":
    main(prog_name="scripts/machines")
