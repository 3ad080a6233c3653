"""Measurements of one machine, plain and with one worker and one shard, and what a plan takes from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median, quantiles

from nfdt.planning.cost_model import Cluster
from nfdt.schedulers.throughput import StepTime

DOMINANT_SHARE = 0.25  # share of a worker's epoch from which overhead, everything but computation, dominates it


@dataclass(frozen=True)
class MeasuredEpochs:
    """Durations of equal epochs.

    Attributes:
        steps: Steps of each epoch.
        seconds: Seconds of each epoch, at least one.
    """

    steps: int
    seconds: tuple[float, ...]

    def __add__(self, other: MeasuredEpochs) -> MeasuredEpochs:
        return replace(self, seconds=self.seconds + other.seconds)

    @property
    def step_s(self) -> float:
        """Seconds of an epoch per step, the median."""
        return median(self.seconds) / self.steps

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the epochs' seconds over their median; the extremes of fewer than four."""
        middle = median(self.seconds)
        if len(self.seconds) < 4:
            return min(self.seconds) / middle, max(self.seconds) / middle
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low / middle, high / middle


@dataclass(frozen=True)
class MeasuredWorker:
    """Epochs of one real worker with one real shard on this machine.

    Attributes:
        epochs: The epochs, as a script sees them.
        step_s: Seconds of a step within a lease, with its exchange.
        exchange_s: Part of ``step_s`` that is not computation.
    """

    epochs: MeasuredEpochs
    step_s: float
    exchange_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of computation of a step."""
        return self.step_s - self.exchange_s

    @property
    def epoch_end_s(self) -> float:
        """Seconds of an epoch in which no step is made: leases, the barrier, merging, callbacks."""
        return (self.epochs.step_s - self.step_s) * self.epochs.steps

    @property
    def overhead_share(self) -> float:
        """Part of an epoch that is not computation."""
        return 1 - self.compute_s / self.epochs.step_s

    @property
    def quiet_step_s(self) -> float:
        """Computation of a step from which the same overhead would be less than ``DOMINANT_SHARE`` of an epoch."""
        return (self.epochs.step_s - self.compute_s) * (1 - DOMINANT_SHARE) / DOMINANT_SHARE


@dataclass(frozen=True)
class Profile:
    """Measured duration of a few steps of a script's model.

    Attributes:
        step: Seconds of a gradient as a function of the samples in its batch.
        apply_s: Seconds that a shard with the whole model takes for a push with its reply.
        plain: Epochs of Keras' own ``fit``, without NFDT; None: not measured.
        worker: Epochs of one worker with one shard; None: not measured.
    """

    step: StepTime
    apply_s: float
    plain: MeasuredEpochs | None = None
    worker: MeasuredWorker | None = None

    def worker_step(self, batch_size: int) -> StepTime:
        """Return the seconds of a gradient in a worker, which are those measured alone if no worker was measured."""
        return self.step if self.worker is None else step_of(self.worker, self.step, batch_size)


@dataclass(frozen=True)
class TableWork:
    """Size of tables that shards make and hold, and that travel by rows.

    Attributes:
        weights: Elements of the tables.
        state_bytes: Bytes of the tables and of the optimizer's variables for them, once all rows are in use.
        row_bytes: Bytes of the rows that a batch looks up, and of their numbers.
    """

    weights: int = 0
    state_bytes: int = 0
    row_bytes: int = 0


@dataclass(frozen=True)
class ProfiledWork:
    """Size of a ``fit``, as needed for a prediction.

    Attributes:
        batch_size: Batch size of one worker.
        samples: Number of samples of an epoch.
        weights: Elements of the model; 0 if unknown.
        profile: Measured durations on this machine, or None.
        state_bytes: Bytes of the weights, the optimizer's variables and the untrained variables; 0 if unknown.
        tables: Tables among the weights that shards make.
    """

    batch_size: int
    samples: int
    weights: int
    profile: Profile | None = None
    state_bytes: int = 0
    tables: TableWork = TableWork()

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of a push, and about those of the reply to it."""
        return 4 * (self.weights - self.tables.weights) + self.tables.row_bytes


def measured_worker(epochs: MeasuredEpochs, step_s: float, exchange_s: float, compute_s: float) -> MeasuredWorker:
    """Return the measurement; a part that exceeds the whole is cut off, as parts are of other steps than the whole.

    Args:
        epochs: The epochs.
        step_s: Measured seconds of a step; 0: unknown.
        exchange_s: Measured part that is not computation.
        compute_s: Seconds of a gradient measured alone; used if ``step_s`` is unknown.
    """
    whole_s = epochs.step_s
    if step_s <= 0:
        step_s, exchange_s = whole_s, whole_s - min(compute_s, 0.95 * whole_s)
    step_s = min(step_s, whole_s)
    return MeasuredWorker(epochs, step_s, min(max(exchange_s, 0.0), 0.95 * step_s))


def step_of(worker: MeasuredWorker, alone: StepTime, batch_size: int) -> StepTime:
    """Return the computation of a worker's step: what it takes beyond a gradient alone does not depend on the batch.

    Args:
        worker: The measured worker.
        alone: Step time of a gradient measured alone.
        batch_size: Samples of the worker's batch.
    """
    more_s = worker.compute_s - alone.seconds(batch_size)
    if more_s >= 0:
        return StepTime(alone.alpha_s + more_s, alone.beta_s)
    return alone.scaled(worker.compute_s / alone.seconds(batch_size))


def with_overhead(cluster: Cluster, worker: MeasuredWorker) -> Cluster:
    """Return a cluster in which every exchange, allreduce and epoch costs also what it cost the measured worker."""
    more_s = max(0.0, worker.exchange_s - cluster.shard_step_s)  # the shard's step is counted already
    return cluster.map_workers(
        lambda each: replace(each, exchange_s=each.exchange_s + more_s),
        allreduce_s=cluster.allreduce_s + worker.exchange_s,
        epoch_end_s=worker.epoch_end_s,
    )


def spread_of_ratio(above: MeasuredEpochs, below: MeasuredEpochs) -> tuple[float, float]:
    """Return the range of ``above`` over ``below`` by the spread of both, relative to the ratio of their medians."""
    (above_low, above_high), (below_low, below_high) = above.spread, below.spread
    return above_low / below_high, above_high / below_low
