"""``scripts/soak``: short jobs under random faults for a long time, then a table of what was survived."""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from nfdt.chaos.accounting import counting_script
from nfdt.chaos.cluster import ChaosCluster
from nfdt.chaos.report import make_report
from nfdt.chaos.schedule import parse_schedule, plan_faults
from nfdt.chaos.trial import Injector, Trial, TrialRecord
from tests.support.machines import unavailable
from tests.support.soak.draw import LOCAL, MACHINES, SCRIPT, TRAINING_S, FaultChoice, SoakJob, draw_job, undisturbed
from tests.support.soak.invariants import violations
from tests.support.soak.machine_trial import run_on_machines
from tests.support.soak.rows import FAULTS, JOBS, UNDISTURBED, fault_rows, read_rows, summarise
from tests.support.soak.stranger import Stranger

PATIENCE_S = 240.0
COUNTS = "counts.json"  # of the counting model
SLOW_S = 30.0  # recovery after which the logs of a job are kept


def run_locally(text: str, script: Path, folder: Path, **options: Any) -> TrialRecord:
    """Run the trial of a schedule on this machine, beside another user; the options are those of a trial."""
    schedule, secret = parse_schedule(text), secrets.token_hex(16)
    cluster = ChaosCluster(schedule.cluster, [str(script)], folder, [f"stranger train {secret}"])
    with Stranger(cluster, secret) as stranger:
        record = Trial(cluster, Injector(cluster), plan_faults(schedule), **options).run()
    record.problems += stranger.problems
    return record


class Soak:
    """Jobs of one soak, on as many threads as jobs run at a time.

    Args:
        seed: Seed of the jobs.
        folder: Folder for rows, and for the logs of jobs that broke an invariant or recovered slowly.
        minutes: Time after which no job is started.
        on_machines: Whether each job runs on several machines.
        job: Number of the only job to run; None: all.
    """

    def __init__(self, seed: int, folder: Path, minutes: float, *, on_machines: bool, job: int | None) -> None:
        self._seed, self._folder = seed, folder
        self._choice: FaultChoice = MACHINES if on_machines else LOCAL
        self._run_trial: Callable[..., TrialRecord] = run_on_machines if on_machines else run_locally
        self._until = time.monotonic() + 60 * minutes
        self._lock = threading.Lock()
        done = len(read_rows([folder], JOBS))
        self._numbers: Iterator[int] = itertools.count(1 + done) if job is None else iter((job,))
        rows = read_rows([folder], UNDISTURBED)
        self._accuracy: dict[tuple[str, int], float] = {
            (row["preset"], row["workers"]): row["accuracy"] for row in rows
        }
        self.stopped = threading.Event()

    def work(self) -> None:
        """Run one job after the other."""
        while time.monotonic() < self._until and not self.stopped.is_set():
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            job = draw_job(self._seed, number, self._choice)
            accuracy = None if job.counts else self._accuracy_of(job)
            if not self.stopped.is_set():
                self._run_job(job, accuracy)

    def _accuracy_of(self, job: SoakJob) -> float | None:
        """Return the accuracy without faults of a job's preset and workers; None if it could not be measured."""
        key = (job.preset, job.workers)
        if key not in self._accuracy:
            folder = self._folder / f"undisturbed-{key[0]}-{key[1]}-{threading.get_ident()}"
            report = make_report(self._run(undisturbed(*key), folder, run_locally))
            if not report.problems:
                self._accuracy[key] = report.result["accuracy"]
                self._append(UNDISTURBED, {"preset": key[0], "workers": key[1], "accuracy": self._accuracy[key]})
                shutil.rmtree(folder, ignore_errors=True)
        return self._accuracy.get(key)

    def _run_job(self, job: SoakJob, accuracy: float | None) -> None:
        folder = self._folder / f"job-{self._seed}-{job.number}"
        record = self._run(job, folder, self._run_trial)
        if self.stopped.is_set():
            return
        report = make_report(record, counts=folder / COUNTS if job.counts else None)
        broken = violations(report, record.jobs, accuracy)
        facts = {"seed": self._seed, "job": job.number, "preset": job.preset, "violations": broken}
        self._append(FAULTS, *fault_rows(self._seed, job, report))
        self._append(JOBS, {**facts, "accuracy": report.result.get("accuracy"), "samples": report.as_json()["samples"]})
        outcome = "; ".join(one.partition("\n")[0] for one in broken) or "survived"
        click.echo(f"job {job.number} ({job.preset}, {len(report.faults)} faults): {outcome}")
        slowest_s = max((fault.recovery_s or 0.0 for fault in report.faults), default=0.0)
        if broken or slowest_s > SLOW_S:
            (folder / "schedule.toml").write_text(job.text)
            (folder / "report.json").write_text(json.dumps({**report.as_json(), **facts}, indent=1))
        else:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, job: SoakJob, folder: Path, run: Callable[..., TrialRecord]) -> TrialRecord:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        script = counting_script(folder / COUNTS, seconds=TRAINING_S) if job.counts else SCRIPT
        (folder / "script.py").write_text(script)
        lines: list[str] = []
        options = {"patience_s": PATIENCE_S, "stopped": self.stopped, "log": lines.append}
        record = run(job.text, folder / "script.py", folder / "trial", **options)
        (folder / "faults.log").write_text("\n".join(lines))
        return record

    def _append(self, name: str, *rows: Any) -> None:
        with self._lock, (self._folder / name).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@click.command()
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Of jobs and schedules; the timing differs.")
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), help="Folder for rows and logs; added to.")
@click.option("--parallel", type=click.IntRange(1), default=1, show_default=True, help="Number of jobs at a time.")
@click.option("--machines", is_flag=True, help="Run each job on several machines; needs root and namespaces of Linux.")
@click.option("--job", type=click.IntRange(1), help="Run only the job of this number.")
@click.option("--sum", "added_up", is_flag=True, help="Add up the soaks in the folders DIR, and run nothing.")
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="[DIR]...")
def main(
    minutes: float,
    seed: int,
    logs: Path | None,
    parallel: int,
    machines: bool,
    job: int | None,
    added_up: bool,
    folders: tuple[Path, ...],
) -> None:
    """Run short jobs under random faults on every role, check invariants after each, and print what was survived."""
    if added_up == (logs is not None) or added_up != bool(folders):
        raise click.UsageError("expected --logs DIR for a soak, or --sum DIR... for several that have ended")
    if machines and (reason := unavailable()):
        raise click.ClickException(f"--machines: network namespaces are needed: {reason}")
    if logs is not None:
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        folders = (logs,)
        _run_soak(Soak(seed, logs, minutes, on_machines=machines, job=job), parallel)
    jobs = read_rows(folders, JOBS)
    click.echo(summarise(read_rows(folders, FAULTS), jobs))
    raise SystemExit(any(job["violations"] for job in jobs))


def _run_soak(soak: Soak, parallel: int) -> None:
    """Run jobs until the time is over; the first signal ends the jobs, and their rows are left out."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: soak.stopped.set())
    threads = [threading.Thread(target=soak.work, name=f"soak-{i}") for i in range(parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(prog_name="scripts/soak")
