"""The simulator: cost of a step of a thousand workers besides its gradient and its shard's step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.images import read_images
from benchmarks.workloads.virtual import VirtualTraining
from nfdt.simulate.cluster import ClusterDescription, parse_cluster

ROWS = ("asgd", "ddc-asgd")
SEED = 1
BATCH = 64
RATE = 0.002


def machines(workers: int) -> ClusterDescription:
    """Describe a rack of equal machines, and one of machines with half their speed."""
    described = [
        {"count": workers - workers // 2, "step_ms": 100, "jitter": 0.1, "link": "quick"},
        {"count": workers // 2, "step_ms": 200, "jitter": 0.1, "link": "slow"},
    ]
    links = {name: {"bandwidth_mbit": 100_000, "latency_ms": 0.1} for name in ("quick", "slow")}
    return parse_cluster({"workers": [d for d in described if d["count"]], "links": links})


def build(seed: int, rate: float, updates: int) -> keras.Model:
    """Build an MLP of 25 k parameters."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Flatten(), keras.layers.Dense(32, activation="relu")]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run(report: Report, *, workers: int, steps: int, rows: Sequence[str] = ROWS, data_dir: Path | None = None) -> None:
    """Simulate a number of steps per worker, on average, with each row."""
    train, test = read_images(data_dir).take(workers * steps * BATCH), read_images(data_dir, "test").take(1000)
    training = VirtualTraining(build, (train.images, train.labels), (test.images, test.labels), BATCH, 1)
    training.run(rows[0], machines(2), seed=SEED, rate=RATE)  # traces
    for row in rows:
        trained = training.run(row, machines(workers), seed=SEED, rate=RATE)
        gradients, case = len(trained.record.answered), f"{workers} workers"
        rest_s = trained.wall_s - trained.gradient_s - trained.shard_s
        for unit, seconds in {
            "ms per step": trained.wall_s,
            "ms gradient": trained.gradient_s,
            "ms shard": trained.shard_s,
            "ms simulator": rest_s,
        }.items():
            report.add(case, row, unit, 1000 * seconds / gradients)
        report.add(case, row, "steps", gradients)
        report.ratios[f"overhead@{row}"] = rest_s / trained.gradient_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    options = parser.parse_args()
    report = Report("simulate", [SEED])
    rows = ROWS[:1] if options.quick else ROWS
    run(report, workers=options.workers, steps=2 if options.quick else 10, rows=rows, data_dir=options.data_dir)
    report.finish(options.json)


if __name__ == "__main__":
    main()
