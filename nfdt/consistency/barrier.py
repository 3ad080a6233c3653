"""Synchronous training (BSP): rounds of one global batch."""

from __future__ import annotations

from nfdt.consistency.free import Free
from nfdt.core.specs.axis_facts import CONSISTENCY_FACTS


class Barrier(Free):
    """A round is M local batches; the next is handed out when all of them are finished.

    The order of rounds is kept by the lease book, which alone knows the parts of a round; hence
    no worker is held back here.

    Args:
        parts: M where one worker does whole rounds, which are then leased at once; None: one part per worker.
    """

    name = "bsp"
    facts = CONSISTENCY_FACTS[name]

    def __init__(self, parts: int | None = None) -> None:
        self._parts = parts
        self.lease_limit: int | None = parts or 1

    def round_parts(self, workers: int) -> int:
        """One part per worker, or the fixed number."""
        return self._parts or max(1, workers)
