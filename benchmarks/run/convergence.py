"""Accuracy after equal samples on simulated clusters, with real gradients: every rule, many workers, unequal speeds."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks.reports.report import Report, Row, arguments
from benchmarks.workloads.convergence_rows import MAIN, ROWS, SEQUENTIAL
from benchmarks.workloads.images import read_cifar10, read_images
from benchmarks.workloads.virtual import Trained, VirtualTraining
from nfdt.core.errors import NfdtError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.simulate.cluster import ClusterDescription, parse_cluster
from nfdt.simulate.results import described_limits

STEP_MS = 100.0
PIXELS = {1: (0.286, 0.353), 3: (0.473, 0.251)}  # mean and deviation of Fashion-MNIST and CIFAR-10
JITTER = 0.2
MOMENTUM = 0.9
SPEEDS = ("equal", "unequal")
TARGET = 0.80


@dataclass(frozen=True)
class Plan:
    """Trainings of one run.

    Attributes:
        rows: Names of ``ROWS``; ``sequential`` is always included.
        workers: Numbers of workers.
        rates: Learning rates; every row is trained at each.
        epochs: Number of epochs of each training.
        samples: Largest number of samples per epoch.
        batch: Size of a local batch.
        dataset: Name in ``DATASETS``.
        optimizer: Name in ``OPTIMIZERS``.
        momentum: Momentum of SGD.
        weight_decay: Decoupled weight decay of the optimizer.
    """

    rows: Sequence[str] = MAIN
    workers: Sequence[int] = (8, 16, 32)
    speeds: Sequence[str] = SPEEDS
    rates: Sequence[float] = (0.05,)
    epochs: int = 3
    samples: int = 60_000
    batch: int = 128
    dataset: str = "fashion-mnist"
    optimizer: str = "sgd"
    momentum: float = MOMENTUM
    weight_decay: float = 0.0


QUICK = Plan(rows=("ddc-asgd", "asgd", "dc-asgd-a"), workers=(8,), speeds=("equal",), epochs=2, samples=8192, batch=32)


def machines(workers: int, speeds: str) -> ClusterDescription:
    """Describe equal machines; or half of them equal, a quarter twice as slow and a quarter five times as slow."""
    counts = {1.0: workers} if speeds == "equal" else {1.0: workers // 2, 2.0: workers // 4}
    counts[5.0] = workers - sum(counts.values())
    described = [
        {"count": count, "step_ms": STEP_MS * times, "jitter": JITTER} for times, count in counts.items() if count
    ]
    return parse_cluster({"workers": described})


def build(seed: int, rate: float, updates: int, plan: Plan) -> keras.Model:
    """Build an MLP of 52 k parameters for small grey images."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Flatten(), *(keras.layers.Dense(width, activation="relu") for width in (64, 32))]
    return _compiled(_optimizer(rate, updates, plan), (28, 28, 1), layers)


def build_cnn(seed: int, rate: float, updates: int, plan: Plan) -> keras.Model:
    """Build a CNN of 60 k parameters for small coloured images."""
    keras.utils.set_random_seed(seed)
    layers: list[Any] = []
    for width in (16, 32, 64):
        layers += [keras.layers.Conv2D(width, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(32, activation="relu")]
    return _compiled(_optimizer(rate, updates, plan), (32, 32, 3), layers)


def _optimizer(rate: float, updates: int, plan: Plan) -> keras.optimizers.Optimizer:
    """Return the plan's optimizer; warm-up over a fifth of the updates, then a cosine to zero."""
    warmup = max(1, updates // 5)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, updates - warmup), warmup_target=rate, warmup_steps=warmup
    )
    return OPTIMIZERS[plan.optimizer](schedule, plan)


def _compiled(optimizer: keras.optimizers.Optimizer, shape: tuple[int, ...], layers: Sequence[Any]) -> keras.Model:
    mean, deviation = PIXELS[shape[-1]]
    first = [keras.Input(shape), keras.layers.Rescaling(1 / deviation, -mean / deviation)]
    model = keras.Sequential([*first, *layers, keras.layers.Dense(10, activation="softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


OPTIMIZERS: dict[str, Callable[[Any, Plan], keras.optimizers.Optimizer]] = {
    "sgd": lambda rate, plan: keras.optimizers.SGD(
        rate, momentum=plan.momentum, weight_decay=plan.weight_decay or None
    ),
    "adamw": lambda rate, plan: keras.optimizers.AdamW(rate, weight_decay=plan.weight_decay),
}
DATASETS = {"fashion-mnist": (read_images, build), "cifar10": (read_cifar10, build_cnn)}


def batches_per_update(preset: str, overrides: dict[str, Any], workers: int) -> float:
    """Return the approximate number of local batches per update, which determines the length of a schedule."""
    algorithm = resolve_algorithm(preset, **overrides)
    if algorithm.consistency == "bsp":
        return workers
    if algorithm.consistency == "softsync":
        return max(1, workers // algorithm.softsync_n)
    return workers / 3 if algorithm.topology == "groups" else 1.0


class Bench:
    """One run of a plan; intermediate results are written after every row."""

    def __init__(self, report: Report, plan: Plan, data_dir: Path | None, json_file: Path | None) -> None:
        self._report, self._plan, self._json = report, plan, json_file
        read, model = DATASETS[plan.dataset]
        train, test = read(data_dir), read(data_dir, "test")
        rows = slice(plan.samples)
        self._data = train.name
        self._training = VirtualTraining(
            partial(model, plan=plan),
            (train.images[rows], train.labels[rows]),
            (test.images, test.labels),
            plan.batch,
            plan.epochs,
        )

    def run(self) -> None:
        """Train every seed of each row, every row of each cluster, every cluster; the sequential row comes first."""
        for rate in self._plan.rates:
            for row, workers, speeds in self._cases():
                for seed in self._report.seeds:
                    self._run(row, workers, speeds, rate, seed)
                self._summarise()

    def _cases(self) -> Iterator[tuple[str, int, str]]:
        yield SEQUENTIAL, 1, "equal"
        for workers in self._plan.workers:
            for speeds in self._plan.speeds:
                for row in self._plan.rows:
                    yield row, workers, speeds

    def _run(self, row: str, workers: int, speeds: str, rate: float, seed: int) -> None:
        preset, overrides = ROWS[row]
        cluster = machines(workers, speeds)
        merged = batches_per_update(preset, overrides, workers)
        case = f"{self._data} M={workers} {speeds} lr={rate:g}"
        if self._plan.momentum != MOMENTUM:
            case += f",momentum={self._plan.momentum:g}"
        if self._plan.optimizer != "sgd":
            case += f",{self._plan.optimizer}"
        if self._plan.weight_decay:
            case += f",weight_decay={self._plan.weight_decay:g}"
        try:
            trained = self._training.run(preset, cluster, seed=seed, rate=rate, merged=merged, overrides=overrides)
        except NfdtError as error:
            self._report.notes.append(f"{row}, {case}, seed {seed}: {error}")
            return
        self._add(case, row, trained, cluster)

    def _add(self, case: str, row: str, trained: Trained, cluster: ClusterDescription) -> None:
        record, batch = trained.record, self._plan.batch
        accuracies = trained.accuracies
        last = record.points[-1].logs
        limit = described_limits(cluster, batch)["samples_per_s"]
        reached = next((at for at, accuracy in accuracies if accuracy >= TARGET), float("inf"))
        values = {
            "% test accuracy": 100 * accuracies[-1][1],
            "test loss": float(np.nan_to_num(last["val_loss"], nan=np.inf)),
            "virtual s": record.seconds,
            f"virtual s to {TARGET:g}": reached,
            "of the limit": record.samples / record.seconds / limit,
            "mean staleness": record.mean_staleness,
            "overhead": (trained.wall_s - trained.gradient_s - trained.shard_s) / trained.gradient_s,
        }
        for unit, value in values.items():
            self._report.add(case, row, unit, value)
        print(f"{case} {row}: {values['% test accuracy']:.2f} %", flush=True)

    def _summarise(self) -> None:
        """Summarise each row as mean and standard deviation, and write the report."""
        best: dict[str, Row] = {}
        for row in self._report.rows:
            if row.unit == "% test accuracy":
                data, workers, speeds, rate = row.case.split()
                name = f"accuracy@{data}@{workers[2:]}@{speeds}@{row.peer}"
                self._report.ratios[f"{name}@{rate}"] = spread(row.runs)
                if name not in best or statistics.mean(row.runs) > statistics.mean(best[name].runs):
                    best[name] = row
        self._report.ratios.update(
            {name: {**spread(row.runs), "at": row.case.split()[-1]} for name, row in best.items()}
        )
        if self._json:
            self._report.write(self._json)


def spread(runs: Sequence[float]) -> dict[str, float]:
    """Return mean, sample standard deviation (0 for one run) and number of runs."""
    std = statistics.stdev(runs) if len(runs) > 1 else 0.0
    return {"mean": round(statistics.mean(runs), 3), "std": round(std, 3), "runs": len(runs)}


def run(report: Report, plan: Plan, data_dir: Path | None, json_file: Path | None = None) -> None:
    """Train all rows of a plan."""
    Bench(report, plan, data_dir, json_file).run()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", help=f"only these of {', '.join(ROWS)}")
    parser.add_argument("--workers", help="sizes of clusters, as in 8,16,32")
    parser.add_argument("--speeds", choices=SPEEDS, action="append")
    parser.add_argument("--dataset", choices=DATASETS)
    parser.add_argument("--rates", help="learning rates, as in 0.1,0.02")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--momentum", type=float, default=MOMENTUM)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--seeds", type=int, help="how many; default 3")
    options = parser.parse_args()
    plan = QUICK if options.quick else Plan()
    given = {
        "rows": options.rows and tuple(options.rows.split(",")),
        "workers": options.workers and tuple(map(int, options.workers.split(","))),
        "rates": options.rates and tuple(map(float, options.rates.split(","))),
        **{name: getattr(options, name) for name in ("speeds", "epochs", "samples", "dataset")},
    }
    optimizer = {name: getattr(options, name) for name in ("optimizer", "momentum", "weight_decay")}
    plan = replace(plan, **optimizer, **{name: value for name, value in given.items() if value})
    report = Report("convergence", list(range(options.seeds or (1 if options.quick else 3))))
    run(report, plan, options.data_dir, options.json)
    report.finish(options.json)


if __name__ == "__main__":
    main()
