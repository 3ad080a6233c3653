"""``nfdt run``: an unmodified script, trained on workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from nfdt.cli.options import (
    ScriptCommand,
    log_to_stderr,
    parse_settings,
    script_argument,
    server_options,
    training_options,
)
from nfdt.cli.process import end_as_killed, quiet_start
from nfdt.cli.script import Script, describe_failure, exit_code_of, run_script, set_backend_of
from nfdt.cli.table import worker_table
from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_server_packages
from nfdt.core.host.startup import quick_imports
from nfdt.core.specs.presets import DEFAULT_PRESET

if TYPE_CHECKING:
    from nfdt_client.session import Session


def print_workers(fits: Sequence[Mapping[str, Any]]) -> None:
    """Print one table of worker statistics per captured ``fit`` to stderr."""
    for number, workers in enumerate(fits, start=1):
        if len(fits) > 1:
            click.echo(f"fit {number} of {len(fits)}", err=True)
        click.echo(worker_table(workers), err=True)


def train_script(context: click.Context, script: Script, opened: Session) -> None:
    """Run ``script`` inside ``opened`` and end the command with the exit code of the outcome."""
    try:
        with _exiting(context), ExitStack() as stack:
            shown = logging.getLogger().isEnabledFor(logging.DEBUG)
            with nullcontext() if shown else quiet_start(), quick_imports():
                stack.enter_context(opened)
            run_script(script)
    finally:
        print_workers([workers for workers in opened.fits if workers])


def submit_script(context: click.Context, script: Script, options: Mapping[str, Any]) -> None:
    """Run ``script`` up to its first fit, submit that as a detached job, and print the job's id."""
    from nfdt_client.decorator import submit

    with _exiting(context):
        handle = submit(run_script, script, options=options)
        click.echo(handle.job_id)
        handle.close()


@contextmanager
def _exiting(context: click.Context) -> Iterator[None]:
    """End the command with the exit code of an exception, and print it as Python would."""
    try:
        yield
    except BaseException as error:  # SystemExit and KeyboardInterrupt have exit codes of their own
        if message := describe_failure(error):
            click.echo(message, err=True)
        context.exit(exit_code_of(error))


@click.command(cls=ScriptCommand)
@click.option("--workers", metavar="N", help="How many workers train.")
@click.option("--data", metavar="WHERE", help="Where fit's data are read: auto, client or workers.")
@click.option("--fallback", metavar="MODE", help="What to do with a fit that cannot be distributed: error or local.")
@click.option("--shards", metavar="N", help="Into how many parts the weights are divided (1).")
@click.option("--job", metavar="NAME", help="Name of the job: the script, run again, attaches to it or resumes it.")
@click.option("--ui", is_flag=True, help="Serve a page for browsers while it runs; its link is printed.")
@click.option("--tensorboard", metavar="DIR", help="Write metrics, and what each worker does, for TensorBoard.")
@click.option("--no-warm", "no_warm", is_flag=True, help="Start a server of its own, even if `nfdt start` keeps one.")
@click.option("--detach", is_flag=True, help="Submit the first fit as a job that needs no client, and print its id.")
@training_options(DEFAULT_PRESET)
@server_options
@click.option("--on", "engine", type=click.Choice(["ray"]), help="Start the workers on this kind of cluster.")
@click.option("--address", metavar="HOST:PORT", help="Head of the Ray cluster; default: RAY_ADDRESS or this machine's.")
@click.option("--slot-cpus", type=click.FloatRange(0, min_open=True), help="CPUs of each slot on Ray; 1 by default.")
@click.option("--slot-gpus", type=click.FloatRange(0), help="GPUs of each worker on Ray; none by default.")
@script_argument()
@click.pass_context
def run(
    context: click.Context,
    script: Script,
    settings: tuple[str, ...],
    log_level: str,
    ui: bool,
    no_warm: bool,
    detach: bool,
    engine: str | None,
    address: str | None,
    slot_cpus: float | None,
    slot_gpus: float | None,
    **named: str | None,
) -> None:
    """Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on workers.

    Without --server, a job server and its workers are started here and taken down at the end.
    With --job, SCRIPT run again goes on with the job of that name; see `nfdt jobs list` for the names.
    With --detach, SCRIPT runs only up to its first model.fit: see `nfdt jobs` for what becomes of the job.
    With --on ray, the job server is started here and its workers on a Ray cluster.
    """
    from nfdt_client.options import resolve
    from nfdt_client.session import Session

    from nfdt.cli.local_server import local_server

    log_to_stderr(log_level)
    given = {name: value for name, value in {**named, **parse_settings(settings)}.items() if value is not None}
    given |= {"warm": "false"} if no_warm else {}
    given |= {"ui": "true"} if ui else {}
    of_ray = {"--address": address, "--slot-cpus": slot_cpus, "--slot-gpus": slot_gpus}
    if engine is None and (idle := [name for name, value in of_ray.items() if value is not None]):
        raise UsageError(f"{idle[0]}: expected --on ray with it. Received: none.")
    if engine is not None and detach:
        raise UsageError("--detach: expected a server that outlives this command (--server). Received: --on ray.")
    set_backend_of(script)
    if detach:
        submit_script(context, script, given)
    elif engine is None:
        options = resolve(given)
        if options.job is not None:
            end_as_killed()
        with local_server(options) as server:
            train_script(context, script, Session(options, server))
    else:
        require_server_packages("nfdt run --on ray")
        from nfdt.engines.ray_cluster import SlotResources, serve_on_ray

        options, resources = resolve(given), SlotResources(slot_cpus or 1.0, slot_gpus or 0.0)
        with serve_on_ray(options, address, resources) as server:
            train_script(context, script, Session(options, server))
