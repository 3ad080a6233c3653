"""Samples per second of one NFDT worker compared with plain Keras fit, the start-up time, and the cost of a barrier."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from nfdt_client.outside import ChangedData, Outside
from nfdt_client.training_data import Indexed, Stream, read

import nfdt
from benchmarks.reports.report import Report, Row, arguments
from benchmarks.workloads.epochs import Measured, Work, measured, now, watch_epochs
from benchmarks.workloads.images import training_images
from benchmarks.workloads.models import SEED, build

BATCH = 128


WORK = {"mlp": Work(60_000, 4, 3), "cnn": Work(10_240, 3, 3), "10M": Work(10_240, 3, 3)}
QUICK = {"mlp": Work(20_480, 3, 1), "cnn": Work(2_560, 2, 1), "10M": Work(2_560, 2, 1)}


PLAIN, ONE, OVERLAP = "plain fit", "nfdt, 1 worker", "nfdt, 1 worker, overlap=1"
OPTIONS: dict[str, dict[str, Any] | None] = {PLAIN: None, ONE: {}, OVERLAP: {"overlap": 1}}
"""Options of the session by peer; None: plain Keras."""


def measure(case: str, work: Work, data_dir: Path | None, options: dict[str, Any] | None) -> Measured:
    """Train once, in this process or on one worker."""
    data = training_images(work.samples, data_dir)
    model = build(case, keras)
    watch, begins = watch_epochs(keras)
    began = now()

    def fit() -> None:
        epochs = work.epochs + 1
        model.fit(data.images, data.labels, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[watch])

    if options is None:
        fit()
    else:
        with nfdt.session(workers=1, algorithm="ddc-asgd", **options):
            fit()
    return measured(begins, work.samples, began)


def run(report: Report, data_dir: Path | None, work: dict[str, Work]) -> None:
    """Measure every case: plain and cluster in turn."""
    later: list[float] = []
    for case, chosen in work.items():
        found: dict[str, list[Measured]] = {peer: [] for peer in OPTIONS}
        for _ in range(chosen.runs):
            for peer, options in OPTIONS.items():
                found[peer].append(measure(case, chosen, data_dir, options))
        for peer, runs in found.items():
            report.rows.append(Row(case, peer, "samples/s", [m.samples_per_s for m in runs]))
            report.rows.append(Row(case, peer, "s of start-up", [m.startup_s for m in runs]))
        for key, peer in (("nfdt", ONE), ("nfdt-overlap", OVERLAP)):
            pairs = zip(found[peer], found[PLAIN], strict=True)
            ratios = [ours.samples_per_s / plain.samples_per_s for ours, plain in pairs]
            report.ratios[f"{key}/plain@{case}"] = statistics.median(ratios)
        pairs = zip(found[ONE], found[PLAIN], strict=True)
        later += [ours.startup_s - plain.startup_s for ours, plain in pairs]
    report.ratios["startup_s"] = statistics.median(later)


class Batches(keras.utils.PyDataset):
    """Dataset that holds 100 MB of arrays.

    Args:
        size: Number of float32 elements.
    """

    def __init__(self, size: int = 25_000_000) -> None:
        super().__init__()
        self.level, self.rows = 0.0, np.ones(size, np.float32)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return self.rows[:BATCH, None] * self.level, self.rows[:BATCH, None]


def compare_at_barriers(report: Report, times: int = 1000) -> None:
    """Measure the comparison of what was sent by value with its present state, where nothing has changed."""
    dataset, loss_weight = Batches(), keras.Variable(0.0)
    stream = read(dataset)
    assert isinstance(stream, Stream)
    cases = {
        "nothing by value": Outside(),
        "a variable in the loss": Outside([loss_weight]),
        "PyDataset of 100 MB": Outside([ChangedData(Indexed.of(stream, dataset, None), "train")]),
    }
    for case, outside in cases.items():
        spent = []
        for _ in range(times):
            began = now()
            assert not outside.changed()
            spent.append(1e6 * (now() - began))
        report.rows.append(Row(case, "nfdt, unchanged", "us per barrier", [statistics.median(spent)]))


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    report = Report("overhead", [SEED])
    compare_at_barriers(report)
    run(report, options.data_dir, QUICK if options.quick else WORK)
    report.finish(options.json)


if __name__ == "__main__":
    main()
