"""Dynamic batch sizes (DBS): local batches in proportion to the speed of their workers."""

from __future__ import annotations

from collections.abc import Sequence

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.axis_facts import BATCH_FACTS
from nfdt.schedulers.batch_size import BatchSizes, Bounds
from nfdt.schedulers.local_sizes import LocalSizes
from nfdt.schedulers.proportions import water_fill
from nfdt.schedulers.throughput import StepTime


class DynamicBatch:
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
