"""Emulated unequal workers: time to a target accuracy, and throughput relative to the sum of the workers' speeds."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.peers.hetero_jobs import Cluster
from benchmarks.peers.keras2 import packages, python_of_keras2
from benchmarks.peers.processes import PeerFailed, run_together, tensorflow_cluster
from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.epochs import now
from benchmarks.workloads.images import read_images
from benchmarks.workloads.models import SEED
from benchmarks.workloads.timed_epochs import Goal, TimedEpoch, seconds_to, throughput
from nfdt.core.errors import NfdtError
from nfdt.core.specs.presets import PRESETS

BASE_S = 0.05  # the fastest worker's step: long enough for two cores to compute the work of eight workers
CLUSTERS = {"1,1,4,4": (1, 1, 4, 4), "1..8": (1, 2, 3, 4, 5, 6, 7, 8)}
SCALING = {f"{workers} x 200 ms": (4,) * workers for workers in (1, 2, 4, 8, 16)}
NAMED = {**CLUSTERS, **SCALING}
MAIN = "1,1,4,4"  # cluster of the ratios without a cluster's name
TARGETS = {"fashion-mnist": 0.84, "digits": 0.95}
TEST_SAMPLES = 2000
PSS, MWMS = "tf_keras PSS", "tf_keras MWMS"
# In this order, so that a short run has the most important rows; unnamed presets come last.
FIRST = ("allreduce", "auto", "h-ps", "asgd", "dbs-sgd", PSS, "group-sync", "ddc-asgd", "bsp", MWMS)
# Start-up and two short epochs on an idle machine; rows that exceed a quick run's minute are left out and reported.
QUICK_S = {"flat": 5.0, "ring": 12.0, "groups": 25.0, PSS: 18.0, MWMS: 16.0}


@dataclass(frozen=True)
class Plan:
    """Peers and length of the trainings.

    Attributes:
        clusters: Name of a cluster, and for each of its workers the step time as a multiple of ``BASE_S``.
        peers: Presets, ``PSS`` and ``MWMS``.
        samples: Number of samples per epoch.
        goal: Goal of each training; a target of 0 means the default target of the data.
        runs: Number of trainings of each peer with each seed.
        seeds: Seeds; all peers train with one seed before the next.
        budget_s: Time limit of the run; rows that would exceed it are left out.
        closing: Whether workers validate after each epoch, and a ModelCheckpoint saves.
    """

    clusters: Mapping[str, Sequence[float]]
    peers: Sequence[str]
    samples: int
    goal: Goal
    runs: int = 1
    seeds: Sequence[int] = (SEED,)
    budget_s: float = float("inf")
    closing: bool = False


def all_peers() -> list[str]:
    """Return every preset and the two strategies of tf_keras."""
    first = [name for name in FIRST if name in PRESETS or name in (PSS, MWMS)]
    return [*first, *(name for name in PRESETS if name not in first)]


FULL_GOAL = Goal(0.0, least_epochs=4, most_epochs=9, limit_s=240.0)
QUICK = Plan({MAIN: CLUSTERS[MAIN]}, (), 1280, Goal(0.3, least_epochs=2, most_epochs=2, limit_s=20.0), budget_s=58.0)
FULL = Plan(CLUSTERS, (), 12_800, FULL_GOAL)
SCALING_PEERS = ("ddc-asgd", "group-sync", "allreduce", "local-ddc")
SCALING_PLAN = Plan(SCALING, SCALING_PEERS, 12_800, Goal(0.0, least_epochs=2, most_epochs=2, limit_s=240.0))


class Bench:
    """One run of the plan.

    Args:
        report: Report that receives the rows.
        plan: Plan to run.
        folder: Directory for files, which contains the images.
        keras2: Python of the environment with tf_keras, if available.
    """

    def __init__(self, report: Report, plan: Plan, folder: Path, keras2: Path | None) -> None:
        self._report, self._plan, self._folder, self._keras2 = report, plan, folder, keras2
        self._began = now()

    def run(self) -> None:
        """Train every peer on every cluster, in turn."""
        for name, speeds in self._plan.clusters.items():
            training = Training(
                data=self._folder / "train.npz",
                test_data=self._folder / "test.npz",
                samples=self._plan.samples,
                step_s=tuple(BASE_S * times for times in speeds),
                goal=self._plan.goal,
                closing=self._plan.closing,
            )
            with Cluster(training.workers) as cluster:
                for seed in self._plan.seeds:
                    for peer in list(self._plan.peers) * self._plan.runs:
                        self._run(cluster, name, peer, replace(training, seed=seed))

    def _run(self, cluster: Cluster, name: str, peer: str, training: Training) -> None:
        if not self._in_time(peer):
            self._leave_out(name, peer, "no time is left in this quick run")
            return
        try:
            epochs = self._train(cluster, peer, training)
        except (PeerFailed, NfdtError) as error:
            self._leave_out(name, peer, f"it failed: {error}")
            return
        if not epochs:
            self._leave_out(name, peer, "there is no environment with tf_keras; a run without --quick makes it")
            return
        speed = throughput(epochs, training.samples)
        self._report.add(name, peer, "samples/s", speed)
        self._report.add(name, peer, "of the limit", speed / training.limit)
        self._report.add(name, peer, "accuracy", epochs[-1][1])
        seconds = seconds_to(training.goal.target, epochs)
        # Infinity: the target was not reached, which a ratio shows, too.
        self._report.add(name, peer, f"s to {training.goal.target}", float("inf") if seconds is None else seconds)

    def _train(self, cluster: Cluster, peer: str, training: Training) -> list[TimedEpoch]:
        if peer not in (PSS, MWMS):
            return cluster.train(peer, training)
        return train_with_strategy(peer, training, self._folder, self._keras2) if self._keras2 else []

    def _in_time(self, peer: str) -> bool:
        cost = QUICK_S.get(peer) or QUICK_S.get(str(PRESETS[peer]["topology"]), max(QUICK_S.values()))
        return now() - self._began + cost <= self._plan.budget_s

    def _leave_out(self, cluster: str, peer: str, why: str) -> None:
        print(f"bench: {peer} on {cluster} is left out: {why}", file=sys.stderr)
        self._report.notes.append(f"{peer} on {cluster}: {why.splitlines()[-1]}")


def train_with_strategy(peer: str, training: Training, folder: Path, keras2: Path) -> list[TimedEpoch]:
    """Train with PSS or MWMS, each role in a separate process.

    Raises:
        PeerFailed: the processes failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as own:
        described, result = Path(own) / "training.json", Path(own) / "epochs.json"
        training.save(described)
        command = [str(keras2), "-m", "benchmarks.peers.emulated_strategies", str(described), str(result)]
        roles = {"chief": 1, "worker": training.workers, "ps": 1} if peer == PSS else {"worker": training.workers}
        environments = tensorflow_cluster(**roles)
        needed = 1 if peer == PSS else training.workers  # the others serve until they are terminated
        run_together([command] * len(environments), environments, needed=needed)
        return [(seconds, accuracy) for seconds, accuracy in json.loads(result.read_text())]


def add_ratios(report: Report, clusters: Sequence[str], target: float) -> None:
    """Add medians of the ratios by run, and ratios of mean seconds; keys without a cluster refer to ``MAIN``."""
    for cluster in clusters:
        at = "" if cluster == MAIN else f"@{cluster}"
        for peer in dict.fromkeys(row.peer for row in report.rows if row.case == cluster):
            report.ratios[f"throughput/limit@{peer}{at}"] = statistics.median(
                report.runs(cluster, peer, "of the limit")
            )
            for other, label in (("allreduce", "allreduce"), (PSS, "pss"), (MWMS, "mwms")):
                own, theirs = (report.runs(cluster, each, f"s to {target}") for each in (peer, other))
                pairs = list(zip(own, theirs, strict=False))
                if peer != other and pairs:
                    report.ratios[f"sooner-than-{label}@{peer}{at}"] = statistics.median(_sooner(*p) for p in pairs)
                if peer != other and len(pairs) > 1:
                    means = (statistics.fmean(seconds) for seconds in zip(*pairs, strict=True))
                    report.ratios[f"mean-sooner-than-{label}@{peer}{at}"] = _sooner(*means)


def _sooner(own: float, theirs: float) -> float:
    """Return ``theirs / own``: 0 if the target was never reached, infinity if only the other peer never reached it."""
    return 0.0 if own == float("inf") else theirs / own


def run(report: Report, plan: Plan, data_dir: Path | None, keras2: Path | None) -> None:
    """Execute a plan."""
    with tempfile.TemporaryDirectory() as folder:
        data = read_images(data_dir)
        data.take(plan.samples).save(Path(folder) / "train.npz")
        read_images(data_dir, "test").take(TEST_SAMPLES).save(Path(folder) / "test.npz")
        target = plan.goal.target or TARGETS[data.name]
        report.notes.append(f"data: {data.name}; target: {target} of the test images right")
        Bench(report, replace(plan, goal=replace(plan.goal, target=target)), Path(folder), keras2).run()
    add_ratios(report, list(plan.clusters), target)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--peers", help="only these, as in allreduce,h-ps")
    parser.add_argument("--scaling", action="store_true", help="1 to 16 equal workers, steps of 200 ms, four presets")
    parser.add_argument("--clusters", choices=NAMED, action="append", help="only this one")
    parser.add_argument("--runs", type=int, help="of every row with every seed; default 1")
    parser.add_argument("--seeds", type=int, help="number of seeds that every row is trained with; default 1")
    parser.add_argument("--least-epochs", type=int, help="of a training, where the target is reached; default 4")
    parser.add_argument(
        "--closing", action="store_true", help="workers validate after each epoch, and a ModelCheckpoint saves"
    )
    options = parser.parse_args()
    plan = QUICK if options.quick else SCALING_PLAN if options.scaling else FULL
    peers = options.peers.split(",") if options.peers else plan.peers or all_peers()
    seeds = tuple(range(SEED, SEED + (options.seeds or 1)))
    plan = replace(plan, peers=peers, runs=options.runs or plan.runs, seeds=seeds, closing=options.closing)
    if options.least_epochs:
        plan = replace(plan, goal=replace(plan.goal, least_epochs=options.least_epochs))
    if options.clusters:
        plan = replace(plan, clusters={name: NAMED[name] for name in options.clusters})
    report = Report("hetero", list(seeds), also=packages())
    wanted = not options.quick and bool({PSS, MWMS} & set(peers))
    run(report, plan, options.data_dir, python_of_keras2(install=wanted))
    report.finish(options.json)


if __name__ == "__main__":
    main()
