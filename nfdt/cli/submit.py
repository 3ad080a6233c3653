"""``nfdt submit``: a script as a batch job of a cluster's scheduler."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nfdt.cli.options import ScriptCommand, parse_settings, script_argument, training_options
from nfdt.cli.script import Script
from nfdt.core.errors import UsageError
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.launch import slurm


@click.command(cls=ScriptCommand)
@click.option("--slurm", "on_slurm", is_flag=True, help="Submit to Slurm, with sbatch.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of machines.")
@click.option("--ntasks-per-node", type=click.IntRange(1), default=2, show_default=True, help="Task 0 of all serves.")
@click.option("--time", metavar="TIME", help="Limit for the job, as sbatch reads it: 01:30:00.")
@click.option(
    "--requeue",
    "requeue_s",
    type=click.IntRange(0),
    default=0,
    metavar="SECONDS",
    help="Save and queue the job again so long before its time is over, or when it is preempted.",
)
@click.option("--job-name", metavar="NAME", help="The script's name unless given.")
@click.option("--sbatch", "options", multiple=True, metavar="OPTION", help="Any other option of sbatch; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@training_options(DEFAULT_PRESET)
@script_argument()
def submit(
    script: Script,
    on_slurm: bool,
    nodes: int,
    ntasks_per_node: int,
    time: str | None,
    requeue_s: int,
    job_name: str | None,
    options: tuple[str, ...],
    dry_run: bool,
    algorithm: str | None,
    settings: tuple[str, ...],
    log_level: str,
) -> None:
    """Train SCRIPT, or with -m a module, in a batch job: srun starts nfdt mpi on every node.

    For example: nfdt submit --slurm --nodes 2 --ntasks-per-node 4 --time 01:00:00 train.py --epochs 10
    """
    if not on_slurm:
        raise UsageError("submit: which scheduler? Expected: --slurm. Received: none.")
    parse_settings(settings)
    command = [*slurm.nfdt_command(sys.executable), "mpi", "--log-level", log_level]
    command += ["--algorithm", algorithm] if algorithm else []
    command += [word for setting in settings for word in ("--set", setting)]
    command += [*(["-m"] if script.is_module else []), script.name, *script.args]
    job = slurm.SlurmJob(
        command,
        job_name or Path(script.name).stem,
        nodes=nodes,
        ntasks_per_node=ntasks_per_node,
        time=time,
        requeue_s=requeue_s,
        options=options,
    )
    click.echo(slurm.batch_script(job) if dry_run else slurm.submit(job), nl=not dry_run)
