"""Samples per second of one NFDT worker against plain Keras fit, and the start-up time."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import nfdt
from benchmarks.epochs import Measured, Work, measured, now, watch_epochs
from benchmarks.images import training_images
from benchmarks.models import SEED, build
from benchmarks.report import Report, Row, arguments

BATCH = 128


WORK = {"mlp": Work(60_000, 4, 3), "cnn": Work(10_240, 3, 3), "10M": Work(10_240, 3, 3)}
QUICK = {"mlp": Work(20_480, 3, 1), "cnn": Work(2_560, 2, 1), "10M": Work(2_560, 2, 1)}


def measure(case: str, work: Work, data_dir: Path | None, *, cluster: bool) -> Measured:
    """Train once, here or on one worker."""
    data = training_images(work.samples, data_dir)
    model = build(case, keras)
    watch, begins = watch_epochs(keras)
    began = now()

    def fit() -> None:
        epochs = work.epochs + 1
        model.fit(data.images, data.labels, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[watch])

    if cluster:
        with nfdt.session(workers=1, algorithm="ddc-asgd"):
            fit()
    else:
        fit()
    return measured(begins, work.samples, began)


def run(report: Report, data_dir: Path | None, work: dict[str, Work]) -> None:
    """Measure every case: plain and cluster by turns."""
    later: list[float] = []
    for case, chosen in work.items():
        plain, cluster = [], []
        for _ in range(chosen.runs):
            plain.append(measure(case, chosen, data_dir, cluster=False))
            cluster.append(measure(case, chosen, data_dir, cluster=True))
        for peer, runs in (("plain fit", plain), ("nfdt, 1 worker", cluster)):
            report.rows.append(Row(case, peer, "samples/s", [m.samples_per_s for m in runs]))
            report.rows.append(Row(case, peer, "s of start-up", [m.startup_s for m in runs]))
        pairs = list(zip(cluster, plain, strict=True))
        report.ratios[f"nfdt/plain@{case}"] = statistics.median(c.samples_per_s / p.samples_per_s for c, p in pairs)
        later += [c.startup_s - p.startup_s for c, p in pairs]
    report.ratios["startup_s"] = statistics.median(later)


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    report = Report("overhead", [SEED])
    run(report, options.data_dir, QUICK if options.quick else WORK)
    report.finish(options.json)


if __name__ == "__main__":
    main()
