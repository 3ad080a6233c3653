"""Speed and staleness of ten jobs chosen beforehand: as `nfdt plan` predicts them, and as they then are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import nfdt
from benchmarks.reports.report import Report, arguments
from benchmarks.run.reality import Overhead, measured
from benchmarks.workloads.models import SEED
from nfdt.cli.options import open_connection

BATCH, FEATURES, CLASSES = 32, 64, 10
SAMPLES, EPOCHS = 6400, 5
UNEQUAL = (20.0, 20.0, 80.0, 80.0)
WITHIN = 0.1  # of the measured speed
SCRIPT = f"""
import keras, numpy as np
model = keras.Sequential(
    [keras.Input(({FEATURES},)), keras.layers.Dense(200, "relu"), keras.layers.Dense({CLASSES}, "softmax")]
)
model.compile("sgd", "sparse_categorical_crossentropy")
x, y = np.zeros(({{samples}}, {FEATURES}), "float32"), np.zeros({{samples}}, "int32")
model.fit(x, y, batch_size={BATCH}, epochs={EPOCHS}, verbose=0)
"""


@dataclass(frozen=True)
class PlannedJob:
    """A job on emulated machines.

    Attributes:
        name: Name of the row.
        algorithm: A preset.
        step_ms: Milliseconds of a step of each worker.
        bandwidth_mbit: Bandwidth of each worker's link; None: not limited.
        options: Options of the algorithm.
    """

    name: str
    algorithm: str
    step_ms: Sequence[float]
    bandwidth_mbit: float | None = None
    options: dict[str, str] = field(default_factory=dict)

    def cluster(self, overhead: Overhead) -> str:
        """Return the machines, all on one host, as a cluster file."""
        more = 'machine = "here"\n' + (f"bandwidth_mbit = {self.bandwidth_mbit}\n" if self.bandwidth_mbit else "")
        workers = (
            f"[[workers]]\nstep_ms = {step_ms}\njitter = {overhead.spread_ms / step_ms}\n{more}"
            for step_ms in self.step_ms
        )
        return f"[shards]\napply_ms = {overhead.exchange_ms}\n" + "".join(workers)

    @property
    def emulate(self) -> dict[str, Any]:
        """The same machines as the option of a job."""
        link = {"bandwidth_mbit": self.bandwidth_mbit} if self.bandwidth_mbit else {}
        return {"step_ms": tuple(self.step_ms), **link}


JOBS = (
    PlannedJob("4 equal", "ddc-asgd", (40.0,) * 4),
    PlannedJob("4 unequal", "ddc-asgd", UNEQUAL),
    PlannedJob("4 unequal", "auto", UNEQUAL),
    PlannedJob("4 unequal", "h-ps", UNEQUAL),
    PlannedJob("4 unequal", "ssp", UNEQUAL),
    PlannedJob("4 unequal", "bsp", UNEQUAL),
    PlannedJob("4 equal", "bsp", (40.0,) * 4),
    PlannedJob("4 equal", "allreduce", (40.0,) * 4),
    PlannedJob("4 equal, 50 Mbit/s", "ddc-asgd", (40.0,) * 4, 50.0),
    PlannedJob("8 equal, 20 Mbit/s", "ddc-asgd", (80.0,) * 8, 20.0, {"overlap": "1"}),
)


def predict(job: PlannedJob, overhead: Overhead, folder: Path, samples: int) -> Path:
    """Return the file of the plan that the command line makes of a job."""
    script, cluster, plan = folder / "train.py", folder / "cluster.toml", folder / "plan.json"
    script.write_text(SCRIPT.format(samples=samples))
    cluster.write_text(job.cluster(overhead))
    settings = [word for name, value in job.options.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "nfdt.cli", "plan", "--cluster", str(cluster), "--algorithm", job.algorithm]
    with plan.open("w") as file:
        subprocess.run([*command, *settings, "--format", "json", str(script)], check=True, stdout=file)
    return plan


def train(job: PlannedJob, plan: Path, samples: int) -> dict[str, float]:
    """Train the job with its forecast, and return the last comparison of both."""
    keras.utils.set_random_seed(SEED)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(200, "relu"), keras.layers.Dense(CLASSES, "softmax")]
    model = keras.Sequential(layers)
    model.compile("sgd", "sparse_categorical_crossentropy")
    random = np.random.default_rng(SEED)
    x, y = random.random((samples, FEATURES), "float32"), random.integers(0, CLASSES, samples)
    with nfdt.LocalCluster(workers=len(job.step_ms), algorithm=job.algorithm) as cluster:
        session: Any = {"algorithm": job.algorithm, "forecast": str(plan), "emulate": job.emulate, **job.options}
        with cluster.session(**session):
            model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
        with open_connection(cluster.address, None, None, insecure=False) as client:
            (trained,) = client.list()
            events = list(client.recorded(trained.job_id))
    return [dict(event.data) for event in events if event.kind == "forecast"][-1]


def run(report: Report, jobs: Sequence[PlannedJob], samples: int = SAMPLES) -> None:
    """Predict and train each job, one after the other; the overhead of a step is measured first."""
    overhead = measured(jobs[0].step_ms, EPOCHS)
    report.add("overhead", "ddc-asgd", "ms to push and reply", overhead.exchange_ms)
    report.add("overhead", "ddc-asgd", "ms between steps, deviation", overhead.spread_ms)
    hits = 0
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            found = train(job, predict(job, overhead, Path(folder), samples), samples)
        off = found["samples_per_s"] / found["measured_samples_per_s"] - 1
        hits += abs(off) <= WITHIN
        report.add(job.name, job.algorithm, "samples/s planned", found["samples_per_s"])
        report.add(job.name, job.algorithm, "samples/s measured", found["measured_samples_per_s"])
        report.add(job.name, job.algorithm, "% off", 100 * off)
        report.add(job.name, job.algorithm, "staleness planned", found["staleness"])
        report.add(job.name, job.algorithm, "staleness measured", found["measured_staleness"])
    report.ratios["within a tenth"] = f"{hits} of {len(jobs)}"


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("forecast", [SEED])
    run(report, JOBS[:2] if options.quick else JOBS, 1920 if options.quick else SAMPLES)
    report.finish(options.json)


if __name__ == "__main__":
    main()
