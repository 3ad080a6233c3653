"""``nfdt run`` and ``hfdt run``: an unmodified script, trained on workers or on the ranks of an allreduce ring."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from nfdt.cli.options import (
    ScriptCommand,
    exiting_as_python,
    log_to_stderr,
    script_argument,
    server_options,
    training_options,
)
from nfdt.cli.process import end_as_killed
from nfdt.cli.script import Script, run_script, set_backend_of
from nfdt.cli.table import worker_table
from nfdt.core.errors import UsageError
from nfdt.core.host.packages import require_server_packages
from nfdt.core.host.startup import quick_imports, quiet_start
from nfdt.core.specs.presets import DEFAULT_PRESET

if TYPE_CHECKING:
    from nfdt_client.session import Session


def train_script(script: Script, opened: Session) -> None:
    """Run ``script`` inside ``opened`` and end the command with the exit code of the outcome."""
    try:
        with exiting_as_python(), ExitStack() as stack:
            with quiet_start(), quick_imports():
                stack.enter_context(opened)
            run_script(script)
    finally:
        fits = [workers for workers in opened.fits if workers]
        for number, workers in enumerate(fits, start=1):
            if len(fits) > 1:
                click.echo(f"fit {number} of {len(fits)}", err=True)
            click.echo(worker_table(workers), err=True)


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
@click.option(
    "--insecure-allreduce",
    is_flag=True,
    default=None,
    help="Let ranks on several nodes of Ray exchange gradients in plain text.",
)
@script_argument()
def run(
    script: Script,
    settings: dict[str, str],
    log_level: str,
    ui: bool,
    no_warm: bool,
    detach: bool,
    engine: str | None,
    address: str | None,
    slot_cpus: float | None,
    slot_gpus: float | None,
    insecure_allreduce: bool | None,
    **named: str | None,
) -> None:
    """Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on workers.

    Without --server, a job server and its workers are started here and taken down at the end.
    With --job, SCRIPT run again goes on with the job of that name; see `nfdt jobs list` for the names.
    With --detach, SCRIPT runs only up to its first model.fit: see `nfdt jobs` for what becomes of the job.
    With --on ray, the job server is started here and its workers on a Ray cluster.
    """
    from nfdt_client.decorator import submit
    from nfdt_client.options import resolve
    from nfdt_client.session import Session

    log_to_stderr(log_level)
    given = {**named, **settings, **({"warm": "false"} if no_warm else {}), **({"ui": "true"} if ui else {})}
    of_ray = {"--address": address, "--slot-cpus": slot_cpus, "--slot-gpus": slot_gpus}
    of_ray["--insecure-allreduce"] = insecure_allreduce
    if engine is None and (idle := [name for name, value in of_ray.items() if value is not None]):
        raise UsageError(f"{idle[0]}: expected --on ray with it. Received: none.")
    if engine is not None and detach:
        raise UsageError("--detach: expected a server that outlives this command (--server). Received: --on ray.")
    set_backend_of(script)
    if detach:
        with exiting_as_python():
            with quiet_start(), quick_imports():
                import nfdt_client.cluster_fit  # noqa: F401  # Keras, whose libraries write nothing to the terminal here
            handle = submit(run_script, script, options=given)
            click.echo(handle.job_id)
            handle.close()
        return
    options = resolve(given)
    if engine is None:
        from nfdt.cli.local_server import local_server

        if options.job is not None:  # a killed script is run again: its job keeps the state meanwhile
            end_as_killed()
        serving = local_server(options)
    else:
        require_server_packages("nfdt run --on ray")
        from nfdt.engines.ray_cluster import SlotResources, on_ray, serve_on_ray

        options, resources = on_ray(options), SlotResources(slot_cpus or 1.0, slot_gpus or 0.0)
        serving = serve_on_ray(options, address, resources, insecure_allreduce=bool(insecure_allreduce))
    with serving as server:
        train_script(script, Session(options, server))


@click.command("run", cls=ScriptCommand)
@click.option("-np", "--workers", "workers", metavar="N", help="How many ranks train.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and how many ranks each takes.")
@click.option("--hostfile", metavar="FILE", help="A file with hosts that the launcher reads.")
@click.option("--launcher", type=click.Choice(["auto", "mpirun", "horovodrun"]), help="auto: mpirun where it exists.")
@click.option("--fusion-threshold-mb", metavar="MIB", help="Reduce small tensors together up to this size.")
@click.option("--cycle-time-ms", metavar="MS", help="How often Horovod looks for tensors to reduce.")
@click.option("--autotune", is_flag=True, default=None, help="Let Horovod search for both.")
@click.option("--autotune-log-file", "autotune_log", metavar="FILE", help="CSV file of what autotune tried.")
@click.option("--timeline-filename", "timeline", metavar="FILE", help="Trace of all reductions, for Perfetto.")
@click.option(
    "--stall-check-warning-time-seconds", "stall_warning_s", metavar="S", help="Name ranks that are that late."
)
@click.option("--stall-check-shutdown-time-seconds", "stall_shutdown_s", metavar="S", help="End the ring then.")
@click.option("--min-np", "min_workers", metavar="N", help="Elastic: go on when ranks die, down to N.")
@click.option("--max-np", "max_workers", metavar="N", help="Elastic: take more ranks, up to N.")
@click.option(
    "--host-discovery-script", metavar="FILE", help="Elastic: a program that prints the hosts there are, a:2 each."
)
@click.option("--commit-steps", metavar="N", help="Elastic: copy the state every N steps.")
@click.option("--elastic-timeout", "elastic_timeout_s", metavar="S", help="Elastic: wait that long for N ranks.")
@click.option("--reset-limit", metavar="N", help="Elastic: give up when ranks came or went more often.")
@training_options("allreduce")
@server_options
@script_argument()
def hfdt_run(script: Script, settings: dict[str, str], log_level: str, **options: str | bool | None) -> None:
    """Run SCRIPT, or with -m a module, unmodified; every model.fit in it trains on the ranks of one allreduce ring.

    For example: hfdt run -np 4 train.py. Under mpirun or srun the ranks are those that it started.
    """
    from nfdt_client.decorator import session

    log_to_stderr(log_level)
    train_script(script, session(options={**options, **settings}, default_algorithm="allreduce"))
