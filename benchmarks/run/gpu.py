"""Samples per second of plain Keras and of 1 to 4 workers on one device, three models, within 8 minutes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.reports.report import Report, arguments
from nfdt.core.host.machine import find_gpus

LIMIT_S, QUICK_S = 470.0, 110.0  # of everything
EPOCH_S = 3.0  # of plain Keras; the epochs of all ways have as many steps
CASES = ("CNN, 1 M", "transformer, 25 M", "transformer, 100 M")
SPEED = ("samples/s", "s of start-up")  # units that plain Keras has, too
PLAIN, SIMULATED = "plain fit", "simulated ResNet-20"
ALL_DEVICES = "1 worker, all devices"
UPDATES = 96  # of a simulated training


@dataclass
class GpuBench:
    """The benchmark: every training is a process, and those for which no time is left are named in a note.

    Attributes:
        report: Where the results go.
        ends: Value of ``time.monotonic`` at which everything ends.
        run_s: Limit of one training.
        small: Whether batches are those for processors.
        epoch_s: Seconds of an epoch of plain Keras.
        gpus: GPUs of this machine.
        devices: Number of devices that the processor acts as; 0: it is one.
    """

    report: Report
    ends: float
    run_s: float
    small: bool = False
    epoch_s: float = EPOCH_S
    gpus: Sequence[str] = ()
    devices: int = 0
    steps: dict[str, int] = field(default_factory=dict)

    @property
    def ways(self) -> dict[str, dict[str, Any] | None]:
        """Options of the session by way; None: plain Keras."""
        numbers = {1: "1 worker", 2: "2 workers", 4: "4 workers"}
        found: dict[str, dict[str, Any] | None] = {PLAIN: None}
        found |= {name: {"algorithm": "ddc-asgd", "workers": count} for count, name in numbers.items()}
        found["2 workers, local steps"] = {"algorithm": "local-ddc", "workers": 2}
        if len(self.gpus) > 1 or self.devices:
            emulated = {"emulate": {"devices": self.devices}} if self.devices else {}
            found[ALL_DEVICES] = {"algorithm": "ddc-asgd", "workers": 1, "devices_per_worker": "all", **emulated}
        return found

    def train(self, case: str, way: str) -> None:
        """Train a case in one way, unless plain Keras could not."""
        options = self.ways[way]
        if options is not None and case not in self.steps:
            return
        module = [sys.executable, "-m", "benchmarks.workloads.gpu_training", case]
        command = [*module, "--epoch-s", str(self.epoch_s), "--steps", str(self.steps.get(case, 0))]
        command += ["--small"] if self.small else []
        command += [] if options is None else ["--options", json.dumps(options)]
        one = {"CUDA_VISIBLE_DEVICES": self.gpus[0]} if self.gpus and way != ALL_DEVICES else {}
        if (text := self._run(f"{case}, {way}", command, one)) is None:
            return
        found = json.loads(text.splitlines()[-1])
        self.steps.setdefault(case, found.pop("steps"))
        found.pop("steps", None)
        if device := found.pop("device", ""):
            self._note(f"device: {device}")
        for unit, value in found.items():
            self.report.add(case, way, unit, value)
        if options is not None:
            plain = self.report.runs(case, PLAIN, "samples/s")[0]
            self.report.ratios[f"{way}/plain@{case}"] = found["samples/s"] / plain

    def simulate(self, folder: Path) -> None:
        """Train ResNet-20 in the simulator, which computes the gradients of several workers in one call of a GPU."""
        if importlib.util.find_spec("jax") is None:
            self._note(f"{SIMULATED}: left out without JAX")
            return
        sizes = ["--quick"] if self.small else ["--updates", str(UPDATES)]
        command = [sys.executable, "-m", "benchmarks.run.batched", *sizes, "--json", str(folder / "simulated.json")]
        if self._run(SIMULATED, command, {"KERAS_BACKEND": "jax"}) is not None:
            for row in json.loads((folder / "simulated.json").read_text())["rows"]:
                for value in row["runs"]:
                    self.report.add(row["case"], row["peer"], row["unit"], value)

    def examine(self) -> None:
        """Note what ``nfdt doctor`` finds about the devices and the packages."""
        # It ends with an error where something that this benchmark does not need is missing.
        text = self._run("nfdt doctor", [sys.executable, "-m", "nfdt.cli", "doctor", "--format", "json"], {}, (0, 1))
        for finding in json.loads(text or "[]"):
            self._note(f"doctor: {finding['subject']}: {finding['verdict']}, {finding['detail']}")

    def _run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], codes: Sequence[int] = (0,)
    ) -> str | None:
        """Return the output of a process; None with a note if it fails, or no time is left."""
        limit_s = min(self.run_s, self.ends - time.monotonic())
        if limit_s <= 0:
            self._note(f"{name}: left out, no time was left")
            return None
        env = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **environment}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._note(f"{name}: not ready within {limit_s:.0f} s")
            return None
        if done.returncode not in codes:
            self._note(f"{name}: failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
            return None
        return done.stdout

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)


def run(bench: GpuBench, cases: Sequence[str], ways: Sequence[str]) -> None:
    """Measure everything, the most important first."""
    bench.examine()
    for case in cases:
        for way in ways:
            bench.train(case, way)
    with tempfile.TemporaryDirectory() as folder:
        bench.simulate(Path(folder))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--limit", type=float, help=f"seconds for everything; default: {LIMIT_S:.0f}")
    parser.add_argument("--cases", default=";".join(CASES), help="only these, as in 'CNN, 1 M'")
    parser.add_argument("--devices", type=int, default=0, help="let the processor act as so many devices")
    options = parser.parse_args()
    gpus = find_gpus(os.environ)
    report = Report("gpu", [0])
    if not gpus:
        report.notes.append("no GPU was measured: this machine has none")
    limit_s = options.limit or (QUICK_S if options.quick else LIMIT_S)
    small = options.quick or not gpus
    epoch_s = 1.0 if options.quick else EPOCH_S
    bench = GpuBench(report, time.monotonic() + limit_s, limit_s / 4, small, epoch_s, gpus, options.devices)
    chosen = [case for case in CASES if case in options.cases.split(";")]
    run(bench, chosen[:1] if options.quick else chosen, list(bench.ways)[: 2 if options.quick else None])
    report.finish(options.json)


if __name__ == "__main__":
    main()
