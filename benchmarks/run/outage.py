"""Outages on machines of namespaces: how long nobody trains, until full speed, samples trained twice or never."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reports.report import Report, arguments
from nfdt.chaos.accounting import (
    counting_script,
    events_of,
    full_speed_after,
    longest_pause,
    read_counts,
    training_times,
)
from nfdt.chaos.trial import TrialRecord
from tests.support.machines import unavailable
from tests.support.soak.machine_trial import run_on_machines

BEFORE_S = 8.0  # of training before the first outage
END_S = 6.0


@dataclass(frozen=True)
class Outage:
    """An outage of one machine or process.

    Attributes:
        kind: As in :class:`~tests.support.soak.machine_schedule.MachineFault`.
        role: Role of the target.
        seconds: Duration.
        after_s: Seconds until the next outage, or the end.
        target_s: Promise: no sample is trained for at most so long, and not while the server is away.
        mbit: Rate of a slow link.
        targets: How many machines of the role are hit, from the first one.
    """

    kind: str
    role: str
    seconds: float
    after_s: float
    target_s: float
    mbit: float | None = None
    targets: int = 1

    def rows(self, at_s: float) -> str:
        """Return the outage as entries of a schedule."""
        fields = [f"kind = {self.kind!r}", f"role = {self.role!r}", f"at_s = {at_s}", f"seconds = {self.seconds}"]
        fields += [f"mbit = {self.mbit}"] if self.mbit is not None else []
        return "\n".join("\n".join(("[[fault]]", f"target = {n}", *fields)) for n in range(self.targets))

    @property
    def name(self) -> str:
        """What happens, in words."""
        what = {"power": "power off", "cut": "link cut", "slow": f"link of {self.mbit} Mbit/s"}
        return f"{self.role}: {what.get(self.kind, 'stopped')}"


@dataclass(frozen=True)
class Run:
    """A job and its outages.

    Attributes:
        preset: Its algorithm.
        outages: The outages, one after the other.
        counts: Whether its weights count how often each sample was trained.
        ends: Whether the outage ends the job, as a rank of a ring that is not elastic does.
    """

    preset: str
    outages: Sequence[Outage]
    counts: bool = False
    ends: bool = False


FLAT = (
    Outage("power", "worker", 8, 24, 3),
    Outage("cut", "worker", 20, 50, 3),
    Outage("slow", "worker", 12, 16, 3, mbit=1),
    Outage("pause", "worker", 12, 24, 3),
    Outage("power", "shard", 8, 22, 15, targets=2),  # both machines: one is used, then a slot of the server's machine
    Outage("stall", "shard", 14, 26, 15),  # the first process, which is that slot
    Outage("pause", "server", 10, 22, 10),
    Outage("power", "server", 4, 36, 10),
)
RUNS = (
    Run("asgd", FLAT, counts=True),
    Run("group-sync", (Outage("power", "worker", 8, 40, 20),)),
    Run("allreduce", (Outage("power", "worker", 8, 20, 30),), ends=True),
)
QUICK = (Run("asgd", (FLAT[0], *FLAT[4:6]), counts=True),)


def schedule(run: Run, workers: int, shards: int) -> tuple[str, float]:
    """Return the schedule of a run as TOML, and the seconds of training that it takes."""
    at_s, rows = BEFORE_S, []
    for outage in run.outages:
        rows.append(outage.rows(at_s))
        at_s += outage.after_s
    options = f'"emulate.step_ms" = 60, algorithm = {run.preset!r}'
    cluster = f"[cluster]\nworkers = {workers}\nshards = {shards}\noptions = {{ {options} }}"
    return "\n\n".join((cluster, *rows)), at_s + END_S


def trial(run: Run, folder: Path, workers: int = 4, shards: int = 2) -> tuple[TrialRecord, Path]:
    """Run a job with its outages; return the record, and the file with the counts of its model."""
    shards = 1 if run.preset == "allreduce" else shards
    text, seconds = schedule(run, workers, shards)
    script, counts = folder / "script.py", folder / "counts.json"
    script.write_text(counting_script(counts, seconds=seconds))
    plain_text = () if run.counts else ("--insecure-allreduce",)  # ranks of several machines need it
    return run_on_machines(text, script, folder / run.preset, plain_text), counts


def pauses(run: Run, record: TrialRecord) -> list[tuple[Outage, float, float | None]]:
    """Return for each outage the seconds in which no sample was trained, and those until full speed.

    The seconds for which the server itself is away do not count. Of a job that ends, the former are those until then.
    """
    times, found = training_times(record.jobs), []
    if run.ends:
        ended_at = next(event.at for _, event in events_of(record.jobs, "state") if event.data["state"] == "failed")
        return [(run.outages[0], ended_at - record.injections[0].at, None)]
    injections = iter(record.injections)
    for outage in run.outages:
        injection, *_ = itertools.islice(injections, outage.targets)
        end = injection.at + outage.after_s
        away_s = outage.seconds if outage.role == "server" else 0.0
        pause_s = max(0.0, longest_pause(times, injection.at, end) - away_s)
        found.append((outage, pause_s, full_speed_after(times, injection.at, end)))
    return found


def measure(report: Report, run: Run, folder: Path, workers: int) -> None:
    """Add the rows of a run."""
    record, counts = trial(run, folder, workers)
    problems = [*([] if run.ends else record.problems), *record.leftovers]
    report.notes += [f"{run.preset}: {problem.splitlines()[0]}" for problem in problems]
    if record.missed:
        report.notes.append(f"{run.preset}: {len(record.missed)} outages were not injected")
        return
    lost, hit = len(list(events_of(record.jobs, "shard_lost"))), sum(one.role == "shard" for one in run.outages)
    if lost < hit:
        report.notes.append(f"{run.preset}: {hit - lost} outages of shards have hit a machine that the job did not use")
    for outage, pause_s, full_s in pauses(run, record):
        case = f"{run.preset}, {outage.name}"
        unit = "s until the job ends" if run.ends else "s nobody trains"
        report.add(case, f"<= {outage.target_s:g}", unit, pause_s)
        if not run.ends:
            report.add(case, "", "s to full speed", float("inf") if full_s is None else full_s)
    if run.counts:
        found = read_counts(counts)
        report.add(run.preset, "0", "samples trained twice", found.again)
        report.add(run.preset, "0", "samples never trained", found.never)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--presets", default=",".join(run.preset for run in RUNS), help="only these")
    parser.add_argument("--workers", type=int, default=4, help="worker machines")
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(f"several machines need network namespaces: {reason}")
    report = Report("outage", [], notes=[f"load of this machine before the run: {os.getloadavg()[0]:.1f}"])
    for run in QUICK if options.quick else RUNS:
        if run.preset in options.presets.split(","):
            with tempfile.TemporaryDirectory() as folder:
                measure(report, run, Path(folder), options.workers)
    report.finish(options.json)


if __name__ == "__main__":
    main()
