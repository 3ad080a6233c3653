"""The interface of a batch policy. It has no state: one instance serves all jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.axis_facts import BatchFacts
from nfdt.schedulers.local_sizes import LocalSizes
from nfdt.schedulers.throughput import StepTime


class BatchPolicy(Protocol):
    """Rule for the number of samples in a worker's step.

    Attributes:
        name: Name on the axis.
        facts: Properties that workers and shards need too, among them the factor of the learning rate.
        adjective: Word for the batches in the explanation of a plan.
    """

    name: str
    facts: BatchFacts
    adjective: str

    def sizes(self, reference: int, algorithm: AlgorithmSpec) -> LocalSizes | None:
        """Return the local batch sizes of a new job, or None if every batch has ``reference`` samples."""
        ...

    def predicted(self, reference: int, times: Sequence[StepTime]) -> list[float]:
        """Return the samples per step, possibly fractions, to which workers with these step times converge."""
        ...
