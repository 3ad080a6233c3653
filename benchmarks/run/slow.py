"""Slow links: unequal machines of namespaces at 10 to 1000 Mbit/s, with an exchange in every step, and local steps."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports.report import Report, arguments
from benchmarks.run.machines import MachinesBench, offer
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.images import read_images
from benchmarks.workloads.models import SEED
from benchmarks.workloads.timed_epochs import Goal, seconds_to, throughput
from tests.support.machines import Rig, unavailable

BASE_S = 0.1  # step of the fastest machines
SPEEDS = (1, 1, 2, 4)
TARGETS = {"fashion-mnist": 0.8, "digits": 0.9}
TEST_SAMPLES = 2000
LINKS = (1000, 100, 10)  # Mbit/s of each machine
LEARNING_RATE = 0.01
LIMIT_S = 300.0  # of the epochs of a way
SHORT = "local-ddc, short epochs"  # its accuracy is tested often enough to know when it was at the target
SOONER = 8.0  # target of local-ddc against an exchange in every step, which has the time to show it


@dataclass(frozen=True)
class Way:
    """A way of exchange.

    Attributes:
        name: Name in the report.
        preset: Preset of the algorithm.
        options: Further options of the job.
        samples: Samples of an epoch on each link, so that it lasts about a minute; a link without is left out.
        most_epochs: Number of epochs after which the training ends without having reached the target.
        limit_s: Seconds after which it ends so.
    """

    name: str
    preset: str
    options: dict[str, Any]
    samples: dict[int, int]
    most_epochs: int = 3
    limit_s: float = LIMIT_S


_LOCAL: dict[str, Any] = {"local_steps": "auto"}
_DILOCO: dict[str, Any] = {"local_steps": 64, "codec": "int4"}
_FEW = {1000: 6400, 100: 640}
_MORE = {1000: 12_800, 100: 5120}  # the codec measures the link with 12 exchanges of each worker
WAYS = (
    Way("every-step", "ddc-asgd", {}, {1000: 12_800, 100: 2560}, 8),
    Way(
        "every-step, adaptive",
        "ddc-asgd",
        {"codec": "adaptive", "overlap": 1},
        {1000: 25_600, 100: 6400, 10: 320},
        20,
        90 * SOONER,
    ),
    Way("local-ddc", "local-ddc", _LOCAL, dict.fromkeys(LINKS, 60_000)),
    Way(SHORT, "local-ddc", _LOCAL, dict.fromkeys(LINKS, 12_000), 10),
    Way("diloco", "diloco", _DILOCO, dict.fromkeys(LINKS, 60_000)),
    Way("diloco, short epochs", "diloco", _DILOCO, dict.fromkeys(LINKS, 12_000), 10),
    Way("allreduce", "allreduce", {}, {1000: 12_800, 100: 3200}, 8),
    Way("bsp", "bsp", {}, _FEW),
    Way("every-step, short epochs", "ddc-asgd", {}, _FEW),
    Way("every-step, tasks by speed", "ddc-asgd", {"tasks": "finish-together"}, _FEW),
    Way("every-step, overlap", "ddc-asgd", {"overlap": 1}, _FEW),
    Way("every-step, quantization", "ddc-asgd", {"codec": "adaptive"}, _MORE),
    Way("h-ps", "h-ps", {}, _MORE),
)


class SlowLinks(MachinesBench):
    """The benchmark."""

    def link(self, mbit: int, ways: tuple[Way, ...], *, quick: bool) -> None:
        """Train in each way on 4 machines of unequal speed, whose links have this rate."""
        data = read_images(self._data_dir)
        data.save(self._folder / "train.npz")
        read_images(self._data_dir, "test").take(TEST_SAMPLES).save(self._folder / "test.npz")
        case, target = f"{mbit} Mbit/s", 0.3 if quick else TARGETS[data.name]
        speeds = tuple(BASE_S * times for times in SPEEDS)
        paths = self._folder / "train.npz", self._folder / "test.npz"
        rig = Rig(["server", *(f"worker{i}" for i in range(len(SPEEDS)))], rate_mbit=mbit)
        with rig, self._cluster(rig, "--insecure-allreduce") as cluster:
            offer(cluster, rig)
            for way in ways:
                samples = min(len(data.labels), 640 if quick else way.samples.get(mbit, 0))
                if not samples:
                    continue
                goal = Goal(target, 2, 2 if quick else way.most_epochs, way.limit_s)
                training = Training(
                    *paths, samples=samples, step_s=speeds, goal=goal, learning_rate=LEARNING_RATE, model="2.5M"
                )
                training.save(self._folder / "training.json")
                with self.left_out(case, way.name):
                    run = {
                        "training": str(self._folder / "training.json"),
                        "preset": way.preset,
                        "options": way.options,
                    }
                    epochs = self._job(cluster, "hybrid", **run)["epochs"]
                    rate, seconds = throughput(epochs, samples), seconds_to(target, epochs)
                    self._report.add(case, way.name, "samples/s", rate)
                    self._report.add(case, way.name, "of the sum of speeds", rate / training.limit)
                    self._report.add(case, way.name, "s of the first epoch", epochs[0][0])
                    self._report.add(case, way.name, "accuracy", epochs[-1][1])
                    self._report.add(case, way.name, "s to target", float("inf") if seconds is None else seconds)
        self._compare(case, "s to target", "every-step, adaptive", SHORT, SOONER)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--links", default=",".join(map(str, LINKS)), help="Mbit/s of the machines, as in 100,10")
    parser.add_argument("--ways", default="", help="only these, as in 'local-ddc;diloco'")
    options = parser.parse_args()
    if reason := unavailable():
        parser.error(f"several machines need network namespaces: {reason}")
    report = Report("slow", [SEED], notes=[f"load of this machine before the run: {os.getloadavg()[0]:.1f}"])
    ways = tuple(way for way in WAYS if not options.ways or way.name in options.ways.split(";"))
    with tempfile.TemporaryDirectory() as folder:
        bench = SlowLinks(report, Path(folder), options.data_dir)
        for mbit in map(int, options.links.split(",")):
            bench.link(mbit, ways, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
