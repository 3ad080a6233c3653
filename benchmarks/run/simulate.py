"""The simulator: cost of a thousand workers besides gradients; deviation of simulation and plans from reality."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from nfdt_client.options import resolve

import nfdt
from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.epochs import now
from benchmarks.workloads.images import read_images
from benchmarks.workloads.virtual import VirtualTraining
from nfdt.cli.simulated import SimulatedSession
from nfdt.cli.table import render
from nfdt.planning.forecast import forecast
from nfdt.simulate.cluster import ClusterDescription, parse_cluster
from nfdt.simulate.costs import costs_of

ROWS = ("asgd", "ddc-asgd")
SEED = 1
BATCH = 64
RATE = 0.002
PEERS = ("planned", "simulated", "real")
COMPARED = (
    *("row", "planned s", "virtual s", "real s", "planned %", "virtual %"),
    *("planned staleness", "virtual", "real", "distance"),
)


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


class EpochSeconds(keras.callbacks.Callback):
    """Real seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Record the start of the epoch."""
        self._began = now()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the seconds of the epoch."""
        self.seconds.append(now() - self._began)


def distance(one: Mapping[int, int], other: Mapping[int, int]) -> float:
    """Return the total variation distance of two histograms: 0 if equal, 1 if disjoint."""
    totals = sum(one.values()), sum(other.values())
    keys = set(one) | set(other)
    return sum(abs(one.get(k, 0) / totals[0] - other.get(k, 0) / totals[1]) for k in keys) / 2


@dataclass(frozen=True)
class Compared:
    """One row, planned, simulated and on real workers.

    Attributes:
        row: Name of the row.
        epoch_s: Seconds per epoch by peer, in the order of ``PEERS``.
        staleness: Mean staleness, in the same order.
        distance: Distance between the simulated and the real histogram of staleness.
    """

    row: str
    epoch_s: tuple[float, float, float]
    staleness: tuple[float, float, float]
    distance: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the row in the table."""
        planned, virtual, real = self.epoch_s
        off = [f"{100 * (seconds / real - 1):+.1f}" for seconds in (planned, virtual)]
        times, delays = ([f"{value:.2f}" for value in values] for values in (self.epoch_s, self.staleness))
        return (self.row, *times, *off, *delays, f"{self.distance:.2f}")


def against_reality(row: str, step_ms: Sequence[float], *, steps: int, epochs: int = 4) -> Compared:
    """Compare one job on real workers with emulated step times, on simulated ones, and as planned.

    The first epoch, in which graphs are traced and speeds are measured, is left out.
    """
    train = read_images(None).take(steps * BATCH)
    fit = {"batch_size": BATCH, "epochs": epochs, "verbose": 0}
    options = {"workers": len(step_ms), "algorithm": row}

    def fitted(opened: Any, callbacks: Sequence[Any] = ()) -> dict[int, int]:
        with opened as session:
            build(SEED, RATE, 0).fit(train.images, train.labels, callbacks=list(callbacks), **fit)
        found: Counter[int] = Counter()
        for worker in session.fits[0].values():
            found.update({int(tau): int(count) for tau, count in worker["staleness"].items()})
        return found

    timed = EpochSeconds()
    real = fitted(nfdt.session(**options, emulate={"step_ms": tuple(step_ms)}), [timed])
    described = parse_cluster({"workers": [{"step_ms": ms} for ms in step_ms]})
    simulated = SimulatedSession(resolve(options), described)
    virtual = fitted(simulated)
    ends = [p.at_s for p in simulated.jobs[0].record.points if p.ends_epoch]
    weights = build(SEED, RATE, 0).count_params()
    planned = forecast(resolve(options).algorithm, costs_of(described, BATCH, weights), len(train.images))
    seconds = planned.epoch_s, (ends[-1] - ends[0]) / (epochs - 1), statistics.median(timed.seconds[1:])
    return Compared(row, seconds, (planned.staleness, _mean(virtual), _mean(real)), distance(real, virtual))


def _mean(counts: Mapping[int, int]) -> float:
    return sum(tau * n for tau, n in counts.items()) / max(1, sum(counts.values()))


def compare(report: Report, rows: Sequence[str], step_ms: Sequence[float], steps: int) -> None:
    """Compare several rows, in a table and in the report."""
    case = f"workers of {','.join(f'{ms:g}' for ms in step_ms)} ms"
    found = [against_reality(row, step_ms, steps=steps) for row in rows]
    for each in found:
        for peer, seconds, staleness in zip(PEERS, each.epoch_s, each.staleness, strict=True):
            report.add(f"{each.row}, {case}", peer, "s per epoch", seconds)
            report.add(f"{each.row}, {case}", peer, "mean staleness", staleness)
        report.ratios[f"planned/real@{each.row}"] = each.epoch_s[0] / each.epoch_s[2]
        report.ratios[f"virtual/real@{each.row}"] = each.epoch_s[1] / each.epoch_s[2]
        report.ratios[f"staleness distance@{each.row}"] = each.distance
    print(render(COMPARED, [each.cells for each in found]))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--real", help="in place of it: compare these rows with real workers, as in asgd,bsp")
    parser.add_argument("--step-ms", default="100,100,200,400", help="of the real workers")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch of the real workers")
    options = parser.parse_args()
    report = Report("simulate", [SEED])
    if options.real:
        compare(report, options.real.split(","), [float(ms) for ms in options.step_ms.split(",")], options.steps)
    else:
        rows = ROWS[:1] if options.quick else ROWS
        run(report, workers=options.workers, steps=2 if options.quick else 10, rows=rows, data_dir=options.data_dir)
    report.finish(options.json)


if __name__ == "__main__":
    main()
