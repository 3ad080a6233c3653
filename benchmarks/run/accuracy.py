"""Accuracy on digits, four workers, at the single machine's learning rate: ddc-asgd, asgd, dc-asgd and plain fit."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import nfdt
from benchmarks.reports.report import Report, Row, arguments

SEEDS = [0, 1, 2]
ALGORITHMS = ("ddc-asgd", "asgd", "dc-asgd")
WORKERS = 4
BATCH = 32
RATES = (0.01, 0.05, 0.1)
TRAIN_ROWS = 42 * BATCH  # whole batches: a tail of three samples is a full update with noise that hides differences


def build(learning_rate: float, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@dataclass(frozen=True)
class Outcome:
    """Test accuracy of one training, and mean staleness of its gradients."""

    accuracy: float
    staleness: float


def _mean_staleness(workers: dict[str, dict[str, Any]]) -> float:
    counts = [(int(tau), n) for worker in workers.values() for tau, n in worker["staleness"].items()]
    return sum(tau * n for tau, n in counts) / sum(n for _, n in counts)


def train(learning_rate: float, seed: int, epochs: int) -> Outcome:
    """Train on digits; with an open session, ``fit`` is captured."""
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        (images / 16.0).astype("float32"), labels, train_size=TRAIN_ROWS, random_state=seed, stratify=labels
    )
    model = build(learning_rate, seed)
    history = model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
    workers = getattr(history, "nfdt", None)
    accuracy = float(model.evaluate(x_test, y_test, verbose=0)[1])
    return Outcome(accuracy, _mean_staleness(workers) if workers else 0.0)


def run(report: Report, *, epochs: int, rates: tuple[float, ...], step_ms: float) -> None:
    """Train every algorithm with every seed; a worker's step takes at least ``step_ms``, so that workers overlap."""
    peers: dict[str, dict[float, list[Outcome]]] = {"plain fit": {}}
    for rate in rates:
        peers["plain fit"][rate] = [train(rate, seed, epochs) for seed in report.seeds]
    for algorithm in ALGORITHMS:
        emulate: Any = {"step_ms": (step_ms,) * WORKERS}
        with nfdt.session(workers=WORKERS, algorithm=algorithm, emulate=emulate):
            peers[algorithm] = {rate: [train(rate, seed, epochs) for seed in report.seeds] for rate in rates}
    for rate in rates:
        for peer, outcomes in peers.items():
            _add(report, f"lr {rate}", peer, outcomes[rate], plain=peers["plain fit"][rate])


def _add(report: Report, case: str, peer: str, outcomes: list[Outcome], plain: list[Outcome]) -> None:
    accuracies = [100 * outcome.accuracy for outcome in outcomes]
    report.rows.append(Row(case, peer, "% test accuracy", accuracies))
    report.rows.append(Row(case, peer, "mean staleness", [outcome.staleness for outcome in outcomes]))
    mean, spread = statistics.mean(accuracies), statistics.pstdev(accuracies)
    report.ratios[f"accuracy@{case}@{peer}"] = f"{mean:.2f} ± {spread:.2f}"
    below = mean - 100 * statistics.mean(outcome.accuracy for outcome in plain)
    report.ratios[f"points over plain@{case}@{peer}"] = below


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=10.0, help="least time of a worker's step")
    options = parser.parse_args()
    report = Report("accuracy", SEEDS[:1] if options.quick else SEEDS)
    rates = RATES[-1:] if options.quick else RATES
    run(report, epochs=3 if options.quick else options.epochs, rates=rates, step_ms=options.step_ms)
    report.finish(options.json)


if __name__ == "__main__":
    main()
