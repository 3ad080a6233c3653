"""Batch policies, by name: the size of each worker's local batch, the same for all or by speed (DBS)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import BATCH_FACTS, BatchFacts
from nfdt.schedulers.proportions import equal_time_split, proportional_split, water_fill
from nfdt.schedulers.throughput import Speeds, StepTime

LOOK_EVERY = 20  # steps of one worker between two reviews
PROBE_STEPS = 6
THRESHOLD = 0.1


class LocalSizes:
    """Samples per step of each worker of a job; they may change after every step.

    Args:
        reference: Samples per step of a worker without a size of its own.
    """

    def __init__(self, reference: int) -> None:
        self.reference = reference
        self._sizes: dict[str, int] = {}

    def of(self, worker: str) -> int:
        """Return the samples per step of this worker."""
        return self._sizes.get(worker, self.reference)

    def next(self, worker: str, left: int) -> int:
        """Return the rows of the worker's next task, where ``left`` rows of the epoch are not leased; 0: it waits."""
        return self.of(worker)

    def look(self, now: float) -> None:
        """Set the time of the calls of :meth:`next` that follow, in seconds."""
        return

    def leased(self, worker: str, rows: int, begins: float) -> None:
        """Record that a worker trains so many rows from a time on."""
        return

    def joined(self, worker: str) -> None:
        """Add a worker."""
        raise NotImplementedError

    def left(self, worker: str) -> None:
        """Remove a worker; unknown workers are no error."""
        raise NotImplementedError

    @property
    def round_steps(self) -> int:
        """Steps of a worker in a synchronous round."""
        return 1

    def stepped(self, worker: str, speeds: Speeds) -> bool:
        """Record a step that ``speeds`` has measured; return whether sizes change now."""
        return False

    def trained(self, worker: str, samples: int, compute_s: float, push_s: float) -> None:
        """Record a task: its samples, and the seconds of its computation and of its push with the reply; 0: unknown."""
        return

    def split(self, total: int) -> list[tuple[str, int]]:
        """Divide a round of ``total`` samples: (worker, samples), without workers that get none."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bounds:
    """Bounds of one worker's batch.

    Attributes:
        least: Minimum number of samples, at least 1.
        most: Maximum number of samples; None: as many as the total allows.
        multiple: Common divisor of all sizes, of ``least``, of ``most`` and of b0.
    """

    least: int = 1
    most: int | None = None
    multiple: int = 1


class BatchSizes(LocalSizes):
    """Local batch sizes of a job's workers; their sum is always M * b0.

    A new worker takes b0. The samples of a worker that leaves are divided among the others in proportion. Sizes are
    reviewed when a speed becomes known or has changed, and whenever a worker has finished 20 more steps. They are
    changed only if one would change by more than 10 %. If nothing would change and some alpha is unknown, sizes are
    tilted once by 10 % to either side, in pairs, so that the next review can determine alpha.

    Args:
        reference: b0, the local batch of ``fit``; between the bounds.
        bounds: Bounds of one worker's batch.
    """

    def __init__(self, reference: int, bounds: Bounds = Bounds()) -> None:
        super().__init__(reference)
        self.bounds = bounds
        self._known: set[str] = set()
        self._looked: dict[str, int] = {}  # steps of each worker at the last review
        self._changes: dict[str, int] = {}  # its changes of speed at the last review
        self._probe: list[dict[str, int]] | None = None  # remaining sizes to try; None: never probed

    @property
    def sizes(self) -> Mapping[str, int]:
        """Samples per step of each worker."""
        return dict(self._sizes)

    def joined(self, worker: str) -> None:
        """Add a worker."""
        self._sizes.setdefault(worker, self.reference)
        self._probe = self._probe and []  # ends a probe under way; None, never probed, stays

    def left(self, worker: str) -> None:
        """Remove a worker; unknown workers are no error."""
        if self._sizes.pop(worker, None) is None:
            return
        self._known.discard(worker)
        self._looked.pop(worker, None)
        self._changes.pop(worker, None)
        self._probe = self._probe and []
        if self._sizes:
            total = len(self._sizes) * self.reference
            self._sizes = self._shared(total, {w: StepTime(0.0, 1 / size) for w, size in self._sizes.items()})

    def stepped(self, worker: str, speeds: Speeds) -> bool:
        """Record a step that ``speeds`` has measured; return whether sizes change now."""
        if worker not in self._sizes or not self._due(worker, speeds):
            return False
        self._known |= {w for w in self._sizes if speeds.of(w).step_time}
        self._looked = {w: speeds.of(w).steps for w in self._sizes}
        self._changes = {w: speeds.of(w).changes for w in self._sizes}
        planned = self._planned(speeds)
        if self._probe is None and len(self._known) == len(self._sizes) and not self._differs(planned):
            self._probe = [] if all(speeds.of(w).identified for w in self._sizes) else self._tilts()
        if self._probe:
            planned = self._probe.pop(0)
        elif not self._differs(planned):
            return False
        self._sizes = planned
        return True

    def split(self, total: int) -> list[tuple[str, int]]:
        """Divide a round of ``total`` samples by the current sizes: (worker, samples), without workers that get none.

        Samples that exceed the bounds of all workers form further parts, for worker "".
        """
        most = self.bounds.most or total
        taken = min(total, most * len(self._sizes))
        shares = proportional_split(taken, [float(size) for size in self._sizes.values()], most=most)
        parts = [(worker, n) for worker, n in zip(self._sizes, shares, strict=True) if n]
        return [*parts, *(("", min(most, total - start)) for start in range(taken, total, most))]

    def _due(self, worker: str, speeds: Speeds) -> bool:
        measured = speeds.of(worker)
        if worker not in self._known and measured.step_time:
            return True
        if measured.changes > self._changes.get(worker, 0):
            return True
        every = PROBE_STEPS if self._probe else LOOK_EVERY
        return measured.steps - self._looked.get(worker, 0) >= every

    def _planned(self, speeds: Speeds) -> dict[str, int]:
        """Return sizes with equal step times for all measured workers; the others keep theirs."""
        times = {w: line for w in self._sizes if (line := speeds.of(w).step_time)}
        return self._sizes | (self._shared(sum(self._sizes[w] for w in times), times) if times else {})

    def _shared(self, total: int, times: Mapping[str, StepTime]) -> dict[str, int]:
        """Divide the total within the bounds so that all workers take the same time."""
        least, most, unit = self.bounds.least, self.bounds.most, self.bounds.multiple
        counts = equal_time_split(total, list(times.values()), least=least, most=most, unit=unit)
        return dict(zip(times, counts, strict=True))

    def _differs(self, planned: Mapping[str, int]) -> bool:
        return any(abs(planned[w] - now) > THRESHOLD * now for w, now in self._sizes.items())

    def _tilts(self) -> list[dict[str, int]]:
        """Return the sizes tilted one way, the other way, and unchanged; empty if the bounds leave no room."""
        there, back = dict(self._sizes), dict(self._sizes)
        names = list(self._sizes)
        for a, b in zip(names[::2], names[1::2], strict=False):
            unit = self.bounds.multiple
            amount = unit * max(1, round(THRESHOLD * min(self.of(a), self.of(b)) / unit))
            room = min(self.of(a), self.of(b)) - amount >= self.bounds.least
            if room and max(self.of(a), self.of(b)) + amount <= (self.bounds.most or math.inf):
                there[a], there[b] = there[a] + amount, there[b] - amount
                back[a], back[b] = back[a] - amount, back[b] + amount
        return [there, back, dict(self._sizes)] if there != self._sizes else []


class BatchPolicy:
    """Rule for the number of samples in a worker's step. It has no state: one instance serves all jobs.

    The methods here are those of batches of one size.

    Attributes:
        name: Name on the axis.
        facts: Properties that workers and shards need too, among them the factor of the learning rate.
        adjective: Word for the batches in the explanation of a plan.
    """

    name: ClassVar[str]
    facts: ClassVar[BatchFacts]
    adjective: ClassVar[str]

    def sizes(self, reference: int, algorithm: AlgorithmSpec) -> LocalSizes | None:
        """Return the local batch sizes of a new job, or None if every batch has ``reference`` samples."""
        return None

    def predicted(self, reference: int, times: Sequence[StepTime]) -> list[float]:
        """Return the samples per step, possibly fractions, to which workers with these step times converge."""
        return [float(reference)] * len(times)


class FixedBatch(BatchPolicy):
    """Batches that all have the size that ``fit`` gives."""

    name = "fixed"
    facts = BATCH_FACTS[name]
    adjective = "fixed"


class DynamicBatch(BatchPolicy):
    """Sizes that follow measured speeds; their sum stays equal to the sum of the reference batches."""

    name = "dbs"
    facts = BATCH_FACTS[name]
    adjective = "dynamic"

    def sizes(self, reference: int, algorithm: AlgorithmSpec) -> LocalSizes | None:
        """Return sizes within the bounds of the job's options."""
        bounds = Bounds(algorithm.batch_min, algorithm.batch_max, algorithm.batch_multiple)
        return BatchSizes(reference, bounds)

    def predicted(self, reference: int, times: Sequence[StepTime]) -> list[float]:
        """Return sizes with which all steps take the same time."""
        _, sizes = water_fill(float(reference) * len(times), times)
        return sizes


BATCH_POLICIES: dict[str, BatchPolicy] = {"fixed": FixedBatch(), "dbs": DynamicBatch()}


def find_batch_policy(name: str) -> BatchPolicy:
    """Return the batch policy of this name on the axis."""
    return BATCH_POLICIES[name]
