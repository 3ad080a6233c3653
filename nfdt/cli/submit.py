"""``nfdt submit``: a script as a batch job of Slurm, in which ``srun`` starts the ranks of ``nfdt mpi``."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from nfdt.cli.options import ScriptCommand, insecure_rings_option, script_argument, training_options
from nfdt.cli.script import Script
from nfdt.core.errors import JobFailed, NotInstalled, UsageError
from nfdt.core.specs.presets import DEFAULT_PRESET

SUBMIT_S = 60.0  # limit for sbatch
TERMINATED = 128 + 15  # exit code of rank 0 after SIGTERM


@dataclass(frozen=True)
class SlurmJob:
    """Allocation of a batch job and the command of its tasks.

    Attributes:
        command: Command of every task; task 0 serves and runs the script, the others are workers.
        name: Name of the job.
        nodes: Number of nodes.
        ntasks_per_node: Number of tasks on each node.
        time: Limit for the job, as sbatch reads it; None for the partition's.
        requeue_s: Seconds before the limit at which the script saves its state and the job is queued again; 0: it ends.
        options: More options of sbatch, each as one word.
    """

    command: Sequence[str]
    name: str
    nodes: int = 1
    ntasks_per_node: int = 2
    time: str | None = None
    requeue_s: int = 0
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.nodes * self.ntasks_per_node < 2:
            raise UsageError("submit: task 0 serves, the others work. Expected: 2 tasks or more. Received: 1.")
        if bad := [option for option in self.options if not option.startswith("--") or "\n" in option]:
            raise UsageError(
                f"submit: --sbatch: expected an option of sbatch as one word, as --mem=8G. Received: {bad[0]!r}."
            )


def batch_script(job: SlurmJob) -> str:
    """Return the batch script of a job."""
    options = [f"--job-name={job.name}", f"--nodes={job.nodes}", f"--ntasks-per-node={job.ntasks_per_node}"]
    options += [f"--time={job.time}"] if job.time else []
    options += ["--output=%x-%j.log", "--no-kill"]
    if job.requeue_s:
        options += ["--open-mode=append", "--requeue", f"--signal=TERM@{job.requeue_s}"]
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in (*options, *job.options))]
    lines += ["# Task 0 serves and runs the script, the other tasks are workers. A lost worker does not end the job."]
    lines += [f"srun --no-kill --kill-on-bad-exit=0 {shlex.join(job.command)}"]
    if job.requeue_s:
        lines += [
            "code=$?",
            f"# {TERMINATED}: Slurm has sent SIGTERM, and BackupAndRestore has saved the state of the training.",
            "# Slurm then ends this script. Its own end, before that, would be the job's failure.",
            f'if [ "$code" = {TERMINATED} ]; then scontrol requeue "$SLURM_JOB_ID" && sleep 60; fi',
            'exit "$code"',
        ]
    return "\n".join(lines) + "\n"


def _sbatch(job: SlurmJob) -> str:
    """Submit a job and return the line that ``sbatch`` prints.

    Raises:
        NotInstalled: There is no sbatch.
        JobFailed: sbatch refused the job or did not answer.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise NotInstalled(
            "submit --slurm: expected the command sbatch in PATH. Received: none. Run this on a login node of the "
            "cluster, or print the script with --dry-run and submit it there."
        )
    try:
        done = subprocess.run([sbatch], input=batch_script(job), capture_output=True, text=True, timeout=SUBMIT_S)
    except subprocess.TimeoutExpired:
        raise JobFailed(f"sbatch did not answer within {SUBMIT_S:.0f} s. Is slurmctld up? Try: sinfo.") from None
    if done.returncode:
        raise JobFailed(f"sbatch refused the job (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout.strip()


@click.command(cls=ScriptCommand)
@click.option("--slurm", "on_slurm", is_flag=True, help="Submit to Slurm, with sbatch.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of machines.")
@click.option("--ntasks-per-node", type=click.IntRange(1), default=2, show_default=True, help="Task 0 of all serves.")
@click.option("--time", metavar="TIME", help="Limit for the job, as sbatch reads it: 01:30:00.")
@click.option(
    *("--requeue", "requeue_s"),
    type=click.IntRange(0),
    default=0,
    metavar="SECONDS",
    help="Save and queue the job again so long before its time is over, or when it is preempted.",
)
@click.option("--job-name", metavar="NAME", help="The script's name unless given.")
@click.option("--sbatch", "options", multiple=True, metavar="OPTION", help="Any other option of sbatch; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@training_options(DEFAULT_PRESET)
@insecure_rings_option
@script_argument()
def submit(
    script: Script,
    on_slurm: bool,
    job_name: str | None,
    dry_run: bool,
    algorithm: str | None,
    settings: dict[str, str],
    log_level: str,
    insecure_allreduce: bool,
    **allocation: Any,
) -> None:
    """Train SCRIPT, or with -m a module, in a batch job: srun starts nfdt mpi on every node.

    For example: nfdt submit --slurm --nodes 2 --ntasks-per-node 4 --time 01:00:00 train.py --epochs 10
    """
    if not on_slurm:
        raise UsageError("submit: which scheduler? Expected: --slurm. Received: none.")
    beside = Path(sys.executable).with_name("nfdt")
    nfdt = [str(beside)] if beside.exists() else [sys.executable, "-m", "nfdt.cli"]
    command = [*nfdt, "mpi", "--log-level", log_level]
    command += ["--algorithm", algorithm] if algorithm else []
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command += ["--insecure-allreduce"] if insecure_allreduce else []
    command += script.words
    job = SlurmJob(command, job_name or Path(script.name).stem, **allocation)
    click.echo(batch_script(job) if dry_run else _sbatch(job), nl=not dry_run)
