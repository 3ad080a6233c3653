"""Simulator, plan and real workers on the same jobs: throughput, staleness and accuracy on three clusters."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from nfdt_client.options import resolve
from sklearn.datasets import load_digits

import nfdt
from benchmarks.reports.report import Report, arguments
from benchmarks.workloads.epochs import now
from nfdt.cli.simulated import SimulatedSession
from nfdt.core.work.spans import APPLY, COMPUTE, read_spans
from nfdt.planning.forecast import forecast
from nfdt.simulate.cluster import ClusterDescription, parse_cluster
from nfdt.simulate.machines import costs_of

BATCH, RATE, MOMENTUM = 16, 0.02, 0.9
TEST_ROWS = 357  # of the 1,797 digits; 90 batches remain
WITHIN = {"throughput": 0.05, "distance": 0.10}


@dataclass(frozen=True)
class Overhead:
    """Parts of a real step that the emulated milliseconds lack.

    Attributes:
        exchange_ms: Milliseconds of a push and its reply, without the transfer over a limited link.
        apply_ms: The part of them in which the shard applies the push, so that others wait.
        spread_ms: Standard deviation of the milliseconds from the begin of a step to that of the next one.
    """

    exchange_ms: float
    apply_ms: float
    spread_ms: float


@dataclass(frozen=True)
class Cluster:
    """Machines that are described to the simulator and emulated for real workers.

    Attributes:
        name: Name in the table.
        step_ms: Milliseconds of a step of each worker.
        bandwidth_mbit: Bandwidth of each worker's link in each direction; None: not limited.
    """

    name: str
    step_ms: tuple[float, ...]
    bandwidth_mbit: float | None = None

    @property
    def _link(self) -> dict[str, Any]:
        return {} if self.bandwidth_mbit is None else {"bandwidth_mbit": self.bandwidth_mbit}

    def described(self, overhead: Overhead, seed: int = 0) -> ClusterDescription:
        """Return the machines for the simulator, all on one host; the seed is that of their step times."""
        apply_ms = min(overhead.apply_ms, overhead.exchange_ms)
        near = {"machine": "here", "latency_ms": (overhead.exchange_ms - apply_ms) / 2, **self._link}
        workers = [{"step_ms": ms, "jitter": overhead.spread_ms / ms, **near} for ms in self.step_ms]
        return parse_cluster({"seed": seed, "workers": workers, "shards": {"apply_ms": apply_ms}})

    @property
    def emulate(self) -> Any:
        """The machines as the option ``emulate`` of a job."""
        return {"step_ms": self.step_ms, **self._link}


CLUSTERS = (
    Cluster("4 equal", (200.0,) * 4),
    Cluster("1,1,4,4", (200.0, 200.0, 800.0, 800.0)),
    Cluster("4 equal, 10 Mbit/s", (200.0,) * 4, 10.0),
)
QUICK = (Cluster("2 equal", (40.0,) * 2),)


@dataclass
class Outcome:
    """One training.

    Attributes:
        epoch_s: Seconds per epoch, see :func:`seconds_per_epoch`.
        staleness: Number of gradients by staleness.
        accuracy: Test accuracy in %.
    """

    epoch_s: float
    staleness: Mapping[int, int]
    accuracy: float


class EpochEnds(keras.callbacks.Callback):
    """Times at which epochs end: workers may begin the next one before the script does."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the time."""
        self.ends.append(now())


def distance(one: Mapping[int, int], other: Mapping[int, int]) -> float:
    """Return the total variation distance of two histograms: 0 if equal, 1 if disjoint."""
    totals = sum(one.values()), sum(other.values())
    return sum(abs(one.get(k, 0) / totals[0] - other.get(k, 0) / totals[1]) for k in {*one, *other}) / 2


def build(seed: int) -> keras.Model:
    """Build an MLP of 17 k parameters for digits."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="relu") for width in (128, 64)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10, activation="softmax")])
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return images between 0 and 1, shape ``(n, 64)``, with labels: 1,440 to train and 357 to test."""
    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype("float32")
    return (x[:-TEST_ROWS], labels[:-TEST_ROWS]), (x[-TEST_ROWS:], labels[-TEST_ROWS:])


def train(session: Any, seed: int, epochs: int, callbacks: Sequence[Any] = ()) -> Outcome:
    """Train on digits in a session; the seconds per epoch are left to the caller."""
    training, test = digits()
    model = build(seed)
    with session as opened:
        model.fit(*training, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks))
    staleness: Counter[int] = Counter()
    for worker in opened.fits[0].values():
        staleness.update({int(tau): int(count) for tau, count in worker["staleness"].items()})
    accuracy = model.evaluate(*test, verbose=0)[1]
    return Outcome(float("nan"), staleness, 100 * accuracy)


def measured(step_ms: Sequence[float], epochs: int) -> Overhead:
    """Measure the overhead of a step by the trace of real workers whose steps are emulated and equal."""
    training, _ = digits()
    model = build(0)
    with nfdt.session(workers=len(step_ms), algorithm="ddc-asgd", emulate={"step_ms": step_ms}) as opened:
        model.fit(*training, batch_size=BATCH, epochs=epochs, verbose=0)
        connection = opened.connection()
        (job,) = connection.list()
        deliveries = connection.trace(job.job_id)
    processes: dict[str, list[bytes]] = {}
    for delivery in deliveries:
        processes.setdefault(delivery.process, []).append(delivery.records)
    spans = {process: read_spans(records) for process, records in processes.items()}
    workers = [found for process, found in spans.items() if process.startswith("worker")]
    return overhead_of(workers, [found for process, found in spans.items() if process.startswith("shard")])


def overhead_of(workers: Sequence[Any], shards: Sequence[Any]) -> Overhead:
    """Return the median overhead of processes by their spans; ends of epochs and starts do not count, being few."""
    applied = [np.median(spans["seconds"][spans["kind"] == APPLY]) for spans in shards]
    exchanges, spreads = [], []
    for spans in workers:
        steps = spans[spans["kind"] == COMPUTE]
        low, usual, high = np.percentile(np.diff(steps["start"]), [16, 50, 84])  # one deviation from the mean
        exchanges.append(usual - np.median(steps["seconds"]))
        spreads.append((high - low) / 2)
    return Overhead(*(1000 * float(np.median(each)) for each in (exchanges, applied, spreads)))


def seconds_per_epoch(ends: Sequence[float]) -> float:
    """Return the mean seconds of an epoch by the times at which epochs ended; the first two do not count.

    In the first one workers compile, and those that have done so may begin the second one.
    """
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def on_workers(row: str, cluster: Cluster, seed: int, epochs: int) -> Outcome:
    """Train on real workers whose steps and links are emulated."""
    timed = EpochEnds()
    session = nfdt.session(workers=len(cluster.step_ms), algorithm=row, emulate=cluster.emulate)
    outcome = train(session, seed, epochs, [timed])
    outcome.epoch_s = seconds_per_epoch(timed.ends)
    return outcome


def simulated(row: str, cluster: Cluster, overhead: Overhead, seed: int, epochs: int) -> Outcome:
    """Train on the described cluster."""
    options = resolve({"workers": len(cluster.step_ms), "algorithm": row})
    session = SimulatedSession(options, cluster.described(overhead, seed))
    outcome = train(session, seed, epochs)
    outcome.epoch_s = seconds_per_epoch([point.at_s for point in session.jobs[0].record.points if point.ends_epoch])
    return outcome


@dataclass
class Comparison:
    """Trainings of one row on one cluster, by seed.

    Attributes:
        real: On real workers.
        virtual: In the simulator.
        planned_s: Seconds per epoch that the plan predicts.
    """

    planned_s: float
    real: list[Outcome] = field(default_factory=list)
    virtual: list[Outcome] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the medians and distances of the table, by unit."""
        real_s, virtual_s = (statistics.median(o.epoch_s for o in side) for side in (self.real, self.virtual))
        together = [sum((Counter(o.staleness) for o in side), Counter()) for side in (self.real, self.virtual)]
        real, virtual = ([o.accuracy for o in side] for side in (self.real, self.virtual))
        return {
            "s per epoch real": real_s,
            "s per epoch simulated": virtual_s,
            "s per epoch planned": self.planned_s,
            "% throughput off, simulated": 100 * (real_s / virtual_s - 1),
            "% throughput off, planned": 100 * (real_s / self.planned_s - 1),
            "distance of staleness": distance(*together),
            "% accuracy real": statistics.mean(real),
            "% accuracy simulated": statistics.mean(virtual),
            "points between them": statistics.mean(virtual) - statistics.mean(real),
            "points between seeds": max(max(each) - min(each) for each in (real, virtual)),
        }


def compare(report: Report, rows: Sequence[str], clusters: Sequence[Cluster], epochs: int) -> None:
    """Train every row on every cluster with all seeds, on real workers and in the simulator by turns.

    The overhead of a step is measured first, on real workers that are as quick as those of the first cluster.
    """
    samples, weights = len(digits()[0][1]), build(0).count_params()
    overhead = measured(clusters[0].step_ms, epochs)
    report.add("overhead", "ddc-asgd", "ms to push and reply", overhead.exchange_ms)
    report.add("overhead", "ddc-asgd", "ms to apply", overhead.apply_ms)
    report.add("overhead", "ddc-asgd", "ms between steps, deviation", overhead.spread_ms)
    met = Counter[str]()
    for cluster in clusters:
        for row in rows:
            planned = forecast(
                resolve({"algorithm": row}).algorithm,
                costs_of(cluster.described(overhead), BATCH, 4 * weights),
                samples,
            )
            compared = Comparison(planned.epoch_s)
            for seed in report.seeds:
                compared.virtual.append(simulated(row, cluster, overhead, seed, epochs))
                compared.real.append(on_workers(row, cluster, seed, epochs))
            figures = compared.figures()
            for unit, value in figures.items():
                report.add(cluster.name, row, unit, value)
            met["throughput"] += abs(figures["% throughput off, simulated"]) <= 100 * WITHIN["throughput"]
            met["staleness"] += figures["distance of staleness"] <= WITHIN["distance"]
            met["accuracy"] += abs(figures["points between them"]) <= figures["points between seeds"]
    for name, count in met.items():
        report.ratios[f"{name} agrees"] = f"{count} of {len(clusters) * len(rows)}"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", help="presets, as in ddc-asgd,bsp; default ddc-asgd")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default 3")
    options = parser.parse_args()
    report = Report("reality", list(range(1 if options.quick else options.seeds)))
    rows = options.rows.split(",") if options.rows else ["ddc-asgd"]
    compare(report, rows, QUICK if options.quick else CLUSTERS, 3 if options.quick else 5)
    report.finish(options.json)


if __name__ == "__main__":
    main()
