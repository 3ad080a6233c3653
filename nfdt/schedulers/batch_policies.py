"""Batch policies, by name: the size of each worker's local batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.axis_facts import BATCH_FACTS, BatchFacts
from nfdt.schedulers.batch_size import BatchSizes, Bounds, LocalSizes
from nfdt.schedulers.proportions import water_fill
from nfdt.schedulers.throughput import StepTime


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
