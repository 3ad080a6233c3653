"""Synchronous training (BSP): rounds of one global batch."""

from __future__ import annotations

from nfdt.consistency.free import Free


class Barrier(Free):
    """A round is M local batches; the next is handed out when all of them are finished.

    The order of rounds is kept by the lease book, which alone knows the parts of a round; hence
    nobody is held back here.
    """

    name = "bsp"
    lease_limit: int | None = 1

    def round_parts(self, workers: int) -> int:
        """One part per worker."""
        return max(1, workers)
