"""Batch scripts for Slurm in which ``srun`` starts the ranks of ``nfdt mpi``."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nfdt.core.errors import JobFailed, NotInstalled, UsageError

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


def submit(job: SlurmJob) -> str:
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


def nfdt_command(python: str) -> list[str]:
    """Return the ``nfdt`` command of a Python's environment."""
    beside = Path(python).with_name("nfdt")
    return [str(beside)] if beside.exists() else [python, "-m", "nfdt.cli"]
