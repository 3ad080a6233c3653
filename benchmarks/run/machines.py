"""Several machines, made of namespaces: rate of 1 to 3 shard machines, the hybrid on unequal ones, data on workers."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.images import read_images
from benchmarks.workloads.models import SEED
from benchmarks.workloads.pipelines import write_records
from benchmarks.workloads.timed_epochs import Goal, seconds_to, throughput
from tests.support.cluster_of_machines import MachinesCluster
from tests.support.machines import Machine, Rig, unavailable

ROOT = Path(__file__).parents[2]
JOB_S = 900
BASE_S = 0.05  # step of the fast machines of ``hybrid``
SPEEDS = (1, 1, 4, 4)
TARGETS = {"fashion-mnist": 0.84, "digits": 0.95}
TEST_SAMPLES = 2000
BATCH = 128
FILES = 8  # of the image pipeline, for each worker machine


class JobFailed(RuntimeError):
    """Failure of a job, with the end of its output."""


@dataclass(frozen=True)
class Work:
    """Length of the jobs.

    Attributes:
        steps: Pushes per epoch and shard machine.
        shards: Numbers of shard machines.
        samples: Samples per epoch of ``hybrid``.
        goal: Goal of ``hybrid``; a target of 0 means the default target of the data.
        records: Samples per epoch and worker machine of ``data``.
        epochs: Epochs of ``shards`` and ``data``; the first, which traces, is not counted.
        cpus: Processors of each worker machine of ``data``; their sum must leave some for the server.
    """

    steps: int
    shards: tuple[int, ...]
    samples: int
    goal: Goal
    records: int
    epochs: int
    cpus: float = 0.55


QUICK = Work(12, (1, 2, 3), 1280, Goal(0.3, 2, 2, 20.0), 2048, epochs=2)
FULL = Work(40, (1, 2, 3), 12_800, Goal(0.0, 4, 9, 240.0), 8192, epochs=4)


class MachinesBench:
    """Base class of benchmarks on machines of namespaces.

    Args:
        report: Report that receives the rows.
        folder: Directory that all machines share.
        data_dir: Folder with images, see :mod:`benchmarks.workloads.images`.
    """

    def __init__(self, report: Report, folder: Path, data_dir: Path | None) -> None:
        self._report, self._folder, self._data_dir = report, folder, data_dir

    @contextmanager
    def _cluster(self, rig: Rig, *options: str) -> Iterator[MachinesCluster]:
        with tempfile.TemporaryDirectory(dir=self._folder) as own:
            with MachinesCluster(Path(own), rig["server"], *options) as cluster:
                yield cluster

    def _job(self, cluster: MachinesCluster, name: str, **values: Any) -> dict[str, Any]:
        """Run a job of :mod:`benchmarks.peers.machine_jobs` on the server's machine."""
        command = [sys.executable, "-m", "benchmarks.peers.machine_jobs", name, json.dumps(values)]
        try:
            done = cluster.machine.run(command, env=cluster.env(), cwd=ROOT, timeout=JOB_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise JobFailed(f"{name} {values} did not end within {JOB_S} s") from error
        if done.returncode:
            raise JobFailed(f"{name} {values} ended with {done.returncode}: {done.stderr[-2000:].strip()}")
        return json.loads(done.stdout.splitlines()[-1])

    @contextmanager
    def left_out(self, case: str, peer: str) -> Iterator[None]:
        """Report the failure of a job, and go on without it."""
        try:
            yield
        except JobFailed as error:
            print(f"bench: {peer} of {case} is left out: {error}", file=sys.stderr)
            self._report.notes.append(f"{peer} of {case} failed: {str(error).splitlines()[-1][:200]}")

    def _compare(self, case: str, unit: str, peer: str, other: str, target: float) -> None:
        """Add the ratio of two rows, and the share of the target that it reaches."""
        own, theirs = (self._report.runs(case, each, unit) for each in (peer, other))
        if own and theirs:
            ratio = statistics.median(own) / statistics.median(theirs)
            name = f"{case}: {unit}, {peer} / {other}"
            self._report.ratios[name] = ratio
            self._report.ratios[f"{name}, of the target {target}"] = ratio / target


class Bench(MachinesBench):
    """Parts of the benchmark; ``work`` has the length of the jobs, the rest is as of :class:`MachinesBench`."""

    def __init__(self, report: Report, work: Work, folder: Path, data_dir: Path | None) -> None:
        super().__init__(report, folder, data_dir)
        self._work = work

    def shards(self) -> None:
        """Push a model of 10 MB from 3 worker machines to 1, 2 and 3 shard machines, over links of 200 Mbit/s."""
        link = 200e6 / 8
        machines = max(self._work.shards)
        names = ["server", *(f"worker{i}" for i in range(3)), *(f"shard{i}" for i in range(machines))]
        rig = Rig(names, rate_mbit=200)
        with rig, self._cluster(rig) as cluster:
            offer(cluster, rig)
            options = {"workers": 3, "algorithm": "asgd", "overlap": 1}
            for shards in self._work.shards:
                steps, before = self._work.steps * shards, self._received(rig)
                answer = self._job(
                    cluster, "push", steps=steps, epochs=self._work.epochs, options={**options, "shards": shards}
                )
                self._check_placement(shards, steps * self._work.epochs * answer["bytes"], before, self._received(rig))
                rate = steps / statistics.median(answer["seconds"][1:])
                peer = f"{shards} shards"
                self._report.add("shards", peer, "pushes/s", rate)
                self._report.add("shards", peer, "of the links", rate * answer["bytes"] / (shards * link))
        for shards, target in ((2, 1.8), (3, 2.6)):
            self._compare("shards", "pushes/s", f"{shards} shards", "1 shards", target)

    @staticmethod
    def _received(rig: Rig) -> list[int]:
        shards = [machine for machine in rig if machine.name.startswith("shard")]
        shown = [machine.run(["ip", "-j", "-s", "link", "show", "eth0"]).stdout for machine in shards]
        return [json.loads(text)[0]["stats64"]["rx"]["bytes"] for text in shown]

    @staticmethod
    def _check_placement(shards: int, pushed: int, before: list[int], after: list[int]) -> None:
        used = sum(now - then > pushed / (2 * shards) for then, now in zip(before, after, strict=True))
        if used != shards:
            raise JobFailed(f"expected pushes on the links of {shards} shard machines. Received: {used}.")

    def hybrid(self) -> None:
        """Train to a target accuracy on 4 machines of unequal speed, over links of 1 Gbit/s."""
        data, goal = read_images(self._data_dir), self._work.goal
        data.take(self._work.samples).save(self._folder / "train.npz")
        read_images(self._data_dir, "test").take(TEST_SAMPLES).save(self._folder / "test.npz")
        goal = Goal(goal.target or TARGETS[data.name], goal.least_epochs, goal.most_epochs, goal.limit_s)
        speeds = tuple(BASE_S * times for times in SPEEDS)
        paths = self._folder / "train.npz", self._folder / "test.npz"
        training = Training(*paths, samples=self._work.samples, step_s=speeds, goal=goal)
        training.save(self._folder / "training.json")
        self._report.notes.append(f"hybrid: {data.name}, to {goal.target} of the test images right")
        rig = Rig(["server", *(f"worker{i}" for i in range(len(SPEEDS)))], rate_mbit=1000)
        with rig, self._cluster(rig, "--insecure-allreduce") as cluster:
            offer(cluster, rig)
            for preset in ("allreduce", "group-sync", "auto", "h-ps"):
                described = str(self._folder / "training.json")
                with self.left_out("hybrid", preset):
                    epochs = self._job(cluster, "hybrid", training=described, preset=preset, options={})["epochs"]
                    self._report.add("hybrid", preset, "samples/s", throughput(epochs, training.samples))
                    self._report.add("hybrid", preset, "accuracy", epochs[-1][1])
                    seconds = seconds_to(goal.target, epochs)
                    self._report.add("hybrid", preset, "s to target", float("inf") if seconds is None else seconds)
        for preset in ("group-sync", "auto"):
            self._compare("hybrid", "s to target", "allreduce", preset, 1.8)

    def data(self) -> None:
        """Augment images on 3 worker machines, on 1, and in the client, over links of 100 Mbit/s."""
        files = [self._folder / f"records-{i}.bin" for i in range(3 * FILES)]
        name = write_records(files, 3 * self._work.records, self._data_dir)
        self._report.notes.append(f"data: {name}; {self._work.cpus} processors per worker machine")
        cpus = [None, *[self._work.cpus] * 3]
        rig = Rig(["server", *(f"worker{i}" for i in range(3))], rate_mbit=100, cpus=cpus)
        with rig, self._cluster(rig) as cluster:
            offer(cluster, rig)
            for peer, where, workers, parts in (
                ("3 machines", "workers", 3, 3),
                ("1 machine", "workers", 1, 1),
                ("client-fed", "client", 3, 1),
            ):
                with self.left_out("data", peer):
                    options = {"workers": workers, "algorithm": "asgd", "data": where}
                    run = {"files": [str(file) for file in files[: parts * FILES]], "batch": BATCH}
                    seconds = self._job(cluster, "images", **run, epochs=self._work.epochs, options=options)["seconds"]
                    samples = parts * self._work.records
                    self._report.add("data", peer, "samples/s", samples / statistics.median(seconds[1:]))
        self._compare("data", "samples/s", "3 machines", "1 machine", 2.5)
        self._compare("data", "samples/s", "3 machines", "client-fed", 3.0)


def offer(cluster: MachinesCluster, rig: Rig) -> None:
    """Start a slot on every machine but the server's, of the role that its name begins with, and await them."""
    with ThreadPoolExecutor(len(rig)) as pool:
        list(pool.map(lambda machine: cluster.offer(machine, **slots_of(machine)), list(rig)[1:]))


def slots_of(machine: Machine) -> dict[str, Any]:
    """Return the slots that a machine offers."""
    return {"shards": 1} if machine.name.startswith("shard") else {"slots": 1}


PARTS: dict[str, Callable[[Bench], None]] = {"shards": Bench.shards, "hybrid": Bench.hybrid, "data": Bench.data}


def run(report: Report, work: Work, data_dir: Path | None, parts: list[str]) -> None:
    """Run parts of the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(report, work, Path(folder), data_dir)
        for part in parts:
            with bench.left_out(part, "all"):
                PARTS[part](bench)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parts", default=",".join(PARTS), help="only these, as in shards,data")
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(f"several machines need network namespaces: {reason}")
    report = Report("machines", [SEED], notes=[f"load of this machine before the run: {os.getloadavg()[0]:.1f}"])
    run(report, QUICK if options.quick else FULL, options.data_dir, options.parts.split(","))
    report.finish(options.json)


if __name__ == "__main__":
    main()
