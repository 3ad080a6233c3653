"""Synchronous training (BSP): rounds of one global batch."""

from __future__ import annotations

from nfdt.consistency.free import Free
from nfdt.core.specs.axis_facts import CONSISTENCY_FACTS


class Barrier(Free):
    """Policy of rounds of M local batches; the next round is leased when all batches of the last are finished.

    The lease book enforces the order of rounds, because only it has the parts of a round. Therefore this policy
    blocks no worker.

    Args:
        parts: M if one worker computes whole rounds, which are then leased at once; None: one part per worker.
    """

    name = "bsp"
    facts = CONSISTENCY_FACTS[name]

    def __init__(self, parts: int | None = None) -> None:
        self._parts = parts
        self.lease_limit: int | None = parts or 1

    def round_parts(self, workers: int) -> int:
        """Return one part per worker, or the fixed number."""
        return self._parts or max(1, workers)
