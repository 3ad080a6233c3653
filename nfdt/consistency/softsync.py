"""n-softsync: an update is the mean of floor(M / n) gradients from any workers."""

from __future__ import annotations

from nfdt.consistency.free import Free
from nfdt.core.specs.axis_facts import CONSISTENCY_FACTS


class Softsync(Free):
    """Policy under which no worker waits; gradients are averaged on arrival.

    References:
        Zhang et al., IJCAI 2016, "Staleness-aware Async-SGD": mean staleness about n.
    """

    name = "softsync"
    facts = CONSISTENCY_FACTS[name]
    lease_limit: int | None = 1

    def __init__(self, n: int) -> None:
        self.n = n

    def merge_count(self, workers: int) -> int:
        """Return ``floor(workers / n)``, at least 1."""
        return max(1, workers // self.n)
