"""Seconds from a command to the end of its script's first step: plain Keras, nfdt run, and on a warm server."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reports.report import Report, arguments
from nfdt.cli.table import render
from nfdt.core.host.startup import VARIABLE

SCRIPT = """
import time
import keras
import numpy as np

x = np.random.default_rng(0).random((512, 16), "f4")
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
model.compile("adam", "mse")

class FirstStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            print(time.time(), flush=True)

model.fit(x, x[:, :4], epochs=1, verbose=0, callbacks=[FirstStep()])
"""
NFDT = (sys.executable, "-m", "nfdt.cli")
RUN = (*NFDT, "run", "--workers", "2", "--set", "batch_hooks=approximate")
PEERS: dict[str, Sequence[str]] = {
    "plain": (sys.executable,),
    "distribute": (sys.executable, "-m", "benchmarks.peers.distributed"),
    "nfdt run": RUN,
    "nfdt run, warm": RUN,
}


@dataclass(frozen=True)
class StartPhase:
    """One phase that a process has reached; see :func:`nfdt.core.host.startup.note_start`."""

    at: float
    cpu_s: float
    process: str
    phase: str


def read_start_log(path: Path) -> Sequence[StartPhase]:
    """Return the phases in a file, by time."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted((StartPhase(**json.loads(line)) for line in lines), key=lambda phase: phase.at)


def measure(command: Sequence[str], script: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """Run a command with a script; return seconds to its first step, and processor seconds of all its processes."""
    before, began = _children_s(), time.time()
    done = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1]) - began, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def describe(phases: Sequence[StartPhase]) -> str:
    """Return the phases of one start as a table; times count from the first phase."""
    rows = [(f"{p.at - phases[0].at:.2f}", f"{p.cpu_s:.2f}", p.process, p.phase) for p in phases]
    return render(("s", "processor s", "process", "phase"), rows)


def run(report: Report, runs: int) -> None:
    """Measure every peer in turn, after one run that is not counted and fills the caches of the file system."""
    with tempfile.TemporaryDirectory(prefix="nfdt-start-") as folder:
        script, log = Path(folder) / "script.py", Path(folder) / "start.log"
        script.write_text(SCRIPT)
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XDG_RUNTIME_DIR": folder}
        measure(PEERS["plain"], script, environment)
        for _ in range(runs):
            for peer, command in PEERS.items():
                warm = peer.endswith("warm")
                if warm:
                    subprocess.run([*NFDT, "start"], env=environment, check=True, capture_output=True)
                log.unlink(missing_ok=True)
                try:
                    first_s, cpu_s = measure(command, script, {**environment, VARIABLE: str(log)})
                finally:
                    if warm:
                        subprocess.run([*NFDT, "stop"], env=environment, check=True, capture_output=True)
                report.add("first step", peer, "s", first_s)
                report.add("whole script", peer, "processor s", cpu_s)
                if log.exists():
                    report.notes = [note for note in report.notes if not note.startswith(f"{peer}:")]
                    report.notes.append(f"{peer}:\n{describe(read_start_log(log))}\n")
    plain = report.runs("first step", "plain", "s")
    for peer in PEERS:
        if peer != "plain":
            later = [a - b for a, b in zip(report.runs("first step", peer, "s"), plain, strict=True)]
            report.ratios[f"{peer}: s later than plain"] = statistics.median(later)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("start", [0])
    run(report, 1 if options.quick else 5)
    report.finish(options.json)


if __name__ == "__main__":
    main()
