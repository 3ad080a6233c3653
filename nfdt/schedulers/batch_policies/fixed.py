"""Local batches of one size."""

from __future__ import annotations

from collections.abc import Sequence

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.axis_facts import BATCH_FACTS
from nfdt.schedulers.local_sizes import LocalSizes
from nfdt.schedulers.throughput import StepTime


class FixedBatch:
    """Batches that all have the size that ``fit`` gives."""

    name = "fixed"
    facts = BATCH_FACTS[name]
    adjective = "fixed"

    def sizes(self, reference: int, algorithm: AlgorithmSpec) -> LocalSizes | None:
        """Return None: all sizes are equal."""
        return None

    def predicted(self, reference: int, times: Sequence[StepTime]) -> list[float]:
        """Return the reference batch for each worker."""
        return [float(reference)] * len(times)
