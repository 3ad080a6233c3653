"""Memory of client, server, shard and worker in vectors of the model, beside the estimate of the planner."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.gpt_script import SIZES
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.planning.memory import COSTS, JobMemory, ModelBytes, estimate

PAUSE_S = 0.1
LIMIT_S = 1800.0
ROLES = ("client", "server", "shard", "worker")
SLOTS = {"sgd": 0, "adamw": 2}
TCP_ONLY = "import os\nif hasattr(os, 'memfd_create'):\n    del os.memfd_create\n"
NFDT = (sys.executable, "-m", "nfdt.cli", "run", "--set", "snapshot_s=2")


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        size: Name of the model.
        optimizer: ``sgd`` or ``adamw``.
        shards: Number of shards.
        link: ``shm``, or ``tcp`` for workers that cannot share memory with shards.
    """

    size: str
    optimizer: str
    shards: int = 1
    link: str = "shm"

    def estimate(self, weights: int) -> JobMemory:
        """Return what the formula says for a model of so many weights."""
        model = ModelBytes(4 * weights, 4 * weights * (1 + SLOTS[self.optimizer]))
        algorithm = resolve_algorithm(DEFAULT_PRESET)
        return estimate(model, algorithm, workers=1, shards=self.shards, shared=self.link == "shm")

    def __str__(self) -> str:
        return f"{self.size} {self.optimizer}, {self.shards} shards, {self.link}"


@dataclass
class Watch:
    """Proportional set sizes of the processes below one, by role, in bytes; several processes of a role are the mean.

    Attributes:
        samples: For each role, the time and the size of each process.
    """

    pid: int
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until ``ended``."""
        while not self.ended.wait(PAUSE_S):
            found: dict[str, list[int]] = defaultdict(list)
            for process in self._processes():
                with contextlib.suppress(psutil.Error, OSError):  # it has ended
                    role, size = self._role(process), process.memory_full_info().pss
                    if role is not None and size:
                        found[role].append(size)
            now = time.time()
            for role, sizes in found.items():
                self.samples[role].append((now, statistics.mean(sizes)))

    def _processes(self) -> Sequence[psutil.Process]:
        try:
            top = psutil.Process(self.pid)
            return [top, *top.children(recursive=True)]
        except psutil.Error:
            return []

    def _role(self, process: psutil.Process) -> str | None:
        if process.pid == self.pid:
            return "client"
        words = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").split()
        if words[0] == "nfdt" and len(words) > 1 and words[1] in ROLES:
            return words[1]
        return "server" if "nfdt.jobserver.main" in process.cmdline() else None


@dataclass(frozen=True)
class Measured:
    """Memory of a training in bytes, by role.

    Attributes:
        weights: Number of weights of the model.
        steady: Median during the last epochs.
        peak: Largest value.
    """

    weights: int
    steady: Mapping[str, float]
    peak: Mapping[str, float]


def measure(case: Case) -> Measured:
    """Train, and sample the memory of all processes."""
    with tempfile.TemporaryDirectory(prefix="nfdt-memory-") as folder:
        paths = [os.getcwd(), os.path.join(os.getcwd(), "client")]
        if case.link == "tcp":
            Path(folder, "sitecustomize.py").write_text(TCP_ONLY, encoding="utf-8")
            paths.insert(0, folder)
        environment = {**os.environ, "NFDT_WARM": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        script = str(Path(__file__).parents[1] / "workloads" / "gpt_script.py")
        command = [*NFDT, "--workers", "1", "--shards", str(case.shards), script, case.size, case.optimizer]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            watch = Watch(process.pid)
            thread = threading.Thread(target=watch.run)
            thread.start()
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            finally:
                watch.ended.set()
                thread.join()
        if process.returncode:
            raise RuntimeError(f"{case}: the training ended with {process.returncode}; its messages are above.")
    marks = dict(line.split() for line in output.splitlines() if line.split()[0] in ("weights", "steady", "trained"))
    begin, end = float(marks["steady"]), float(marks["trained"])
    peak = {role: max(size for _, size in watch.samples[role]) for role in ROLES}
    steady = {}
    for role in ROLES:
        sizes = [size for at, size in watch.samples[role] if begin <= at <= end]
        # The steps of a tiny model may be over before a sample is taken.
        steady[role] = statistics.median(sizes or [size for at, size in watch.samples[role] if at <= end][-3:])
    return Measured(int(marks["weights"]), steady, peak)


def run(report: Report, cases: Sequence[Case]) -> None:
    """Measure each case above a tiny model, whose memory is that of the processes themselves."""
    base = {link: measure(Case("tiny", "sgd", link=link)) for link in sorted({case.link for case in cases})}
    for link, found in base.items():
        for role in ROLES:
            report.add(f"base, {link}", role, "MB", found.steady[role] / 1e6)
    for case in cases:
        found = measure(case)
        vector = 4 * found.weights
        for role in ROLES:
            estimated = getattr(case.estimate(found.weights), role)
            for kind in ("steady", "peak"):
                above = (getattr(found, kind)[role] - base[case.link].steady[role]) / vector
                formula = (getattr(estimated, kind) - COSTS[role].base) / vector
                report.add(str(case), f"{role}, {kind}", "vectors", above)
                report.add(str(case), f"{role}, {kind}, formula", "vectors", formula)
                report.ratios[f"measured/formula@{case}@{role}, {kind}"] = above / formula if formula else 0.0


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=[*SIZES][1:], action="append", help="of the model; all of them")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), action="append", help="both")
    parser.add_argument("--shards", type=int, action="append", help="1 and 2")
    parser.add_argument("--link", choices=("shm", "tcp"), action="append", help="between worker and shard; both")
    options = parser.parse_args()
    sizes = options.size or (["30M"] if options.quick else [*SIZES][1:])
    shards = options.shards or ([1] if options.quick else [1, 2])
    links = options.link or (["shm"] if options.quick else ["shm", "tcp"])
    cases = [
        Case(size, optimizer, count, link)
        for size in sizes
        for optimizer in options.optimizer or ("sgd", "adamw")
        for count in shards
        for link in links
    ]
    report = Report("memory", [1])
    run(report, cases)
    report.finish(options.json)


if __name__ == "__main__":
    main()
