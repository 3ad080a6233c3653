"""Samples per second of an allreduce job on 2 ranks against a Horovod loop written by hand."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import hfdt
from benchmarks.images import training_images
from benchmarks.overhead import BATCH, CASES, QUICK, SEED, Work
from benchmarks.report import Report, Row, arguments
from nfdt.launch.ring import surroundings
from nfdt.launch.ring_command import RingShape, ring_command

RANKS = 2
LAUNCHERS = ("mpirun", "horovodrun")
LIMIT_S = 600


def by_hand(case: str, work: Work, launcher: str, data_dir: Path | None) -> float:
    """Samples per second of the loop of benchmarks/horovod_loop.py."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        program = [sys.executable, "-m", "benchmarks.horovod_loop", case, "--result", str(result)]
        program += ["--samples", str(work.samples), "--epochs", str(work.epochs + 1)]
        program += ["--data-dir", str(data_dir)] if data_dir else []
        command = ring_command(RingShape(RANKS, launcher), program, surroundings())
        subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = json.loads(result.read_text())
    counted = seconds[1:-1]
    return work.samples * len(counted) / sum(counted)


def by_hfdt(case: str, work: Work, launcher: str, data_dir: Path | None) -> float:
    """Samples per second of the script, captured; the first epoch, which traces, and the last are not counted."""
    images, labels, _ = training_images(work.samples, data_dir)
    begins: list[float] = []

    def schedule(epoch: int, learning_rate: float) -> float:
        begins.append(time.perf_counter())
        return learning_rate

    watch = keras.callbacks.LearningRateScheduler(schedule)
    with hfdt.session(workers=RANKS, launcher=launcher):
        CASES[case][0]().fit(images, labels, batch_size=BATCH, epochs=work.epochs + 1, verbose=0, callbacks=[watch])
    return work.samples * (work.epochs - 1) / (begins[-1] - begins[1])


def run(report: Report, data_dir: Path | None, *, quick: bool) -> None:
    """Measure every case under every launcher: by hand and with hfdt by turns."""
    for launcher in LAUNCHERS:
        ratios = []
        for case, (_, work) in CASES.items():
            chosen = QUICK[case] if quick else work
            hand, ours = [], []
            for _ in range(chosen.runs):
                hand.append(by_hand(case, chosen, launcher, data_dir))
                ours.append(by_hfdt(case, chosen, launcher, data_dir))
            report.rows.append(Row(f"{case} {launcher}", "by hand", "samples/s", hand))
            report.rows.append(Row(f"{case} {launcher}", "hfdt", "samples/s", ours))
            ratio = statistics.median(o / h for o, h in zip(ours, hand, strict=True))
            report.ratios[f"hfdt/handwritten@{launcher}@{case}"] = ratio
            ratios.append(ratio)
        report.ratios[f"hfdt/handwritten@{launcher}"] = statistics.median(ratios)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-dir", type=Path, help="folder with fashion-mnist/*.gz")
    options = parser.parse_args()
    report = Report("hfdt", [SEED])
    run(report, options.data_dir, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
