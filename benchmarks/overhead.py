"""Samples per second of one NFDT worker against plain Keras fit, and the start-up time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

import nfdt
from benchmarks.images import training_images
from benchmarks.report import Report, Row, arguments

BATCH = 128
SEED = 1


def mlp() -> keras.Model:
    """0.1 M parameters."""
    return _classifier([keras.layers.Flatten(), keras.layers.Dense(128, activation="relu")])


def cnn() -> keras.Model:
    """1 M parameters."""
    return _classifier(
        [
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(312, activation="relu"),
        ]
    )


def wide() -> keras.Model:
    """10 M parameters."""
    widths = (2500, 2500, 700)
    return _classifier([keras.layers.Flatten(), *(keras.layers.Dense(w, activation="relu") for w in widths)])


def _classifier(layers: list[keras.layers.Layer]) -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10, activation="softmax")])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@dataclass(frozen=True)
class Work:
    """How much is trained for one measurement; the first epoch, which traces, and the last are not counted."""

    samples: int
    epochs: int
    runs: int


CASES: dict[str, tuple[Callable[[], keras.Model], Work]] = {
    "mlp": (mlp, Work(samples=60_000, epochs=4, runs=3)),
    "cnn": (cnn, Work(samples=10_240, epochs=3, runs=3)),
    "10M": (wide, Work(samples=10_240, epochs=3, runs=3)),
}
QUICK = {"mlp": Work(20_480, 3, 1), "cnn": Work(2_560, 2, 1), "10M": Work(2_560, 2, 1)}


@dataclass(frozen=True)
class Measured:
    """One fit: samples per second after the first epoch, and what the first epoch took longer than the others, in s."""

    samples_per_s: float
    startup_s: float


def measure(build: Callable[[], keras.Model], work: Work, data_dir: Path | None, *, cluster: bool) -> Measured:
    """Train once, here or on one worker."""
    images, labels, _ = training_images(work.samples, data_dir)
    model = build()
    begins: list[float] = []

    def schedule(epoch: int, learning_rate: float) -> float:
        begins.append(time.perf_counter())
        return learning_rate

    # A callback of Keras' own that looks at no weights: one of ours would make the cluster send them every epoch.
    watch = keras.callbacks.LearningRateScheduler(schedule)
    began = time.perf_counter()

    def fit() -> None:
        model.fit(images, labels, batch_size=BATCH, epochs=work.epochs + 1, verbose=0, callbacks=[watch])

    if cluster:
        with nfdt.session(workers=1, algorithm="ddc-asgd"):
            fit()
    else:
        fit()
    epoch_s = (begins[-1] - begins[1]) / (work.epochs - 1)
    return Measured(work.samples / epoch_s, begins[1] - began - epoch_s)


def run(report: Report, data_dir: Path | None, *, quick: bool) -> None:
    """Measure every case: plain and cluster by turns."""
    later: list[float] = []
    for case, (build, work) in CASES.items():
        chosen = QUICK[case] if quick else work
        plain, cluster = [], []
        for _ in range(chosen.runs):
            plain.append(measure(build, chosen, data_dir, cluster=False))
            cluster.append(measure(build, chosen, data_dir, cluster=True))
        for peer, measured in (("plain fit", plain), ("nfdt, 1 worker", cluster)):
            report.rows.append(Row(case, peer, "samples/s", [m.samples_per_s for m in measured]))
            report.rows.append(Row(case, peer, "s of start-up", [m.startup_s for m in measured]))
        pairs = list(zip(cluster, plain, strict=True))
        report.ratios[f"nfdt/plain@{case}"] = statistics.median(c.samples_per_s / p.samples_per_s for c, p in pairs)
        later += [c.startup_s - p.startup_s for c, p in pairs]
    report.ratios["startup_s"] = statistics.median(later)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-dir", type=Path, help="folder with fashion-mnist/*.gz")
    options = parser.parse_args()
    report = Report("overhead", [SEED])
    run(report, options.data_dir, quick=options.quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()
