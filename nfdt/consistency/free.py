"""Asynchronous training without a bound (ASP): no worker waits for another."""

from __future__ import annotations

from nfdt.core.specs.axis_facts import CONSISTENCY_FACTS


class Free:
    """Policy of asynchronous training (ASP): no worker waits for another."""

    name = "free"
    facts = CONSISTENCY_FACTS[name]
    lease_limit: int | None = None

    def joined(self, worker: str) -> None:
        """Do nothing: no state depends on this event."""

    def left(self, worker: str) -> None:
        """Do nothing: no state depends on this event."""

    def started(self, worker: str, tasks: int = 1) -> None:
        """Do nothing: no state depends on this event."""

    def finished(self, worker: str, tasks: int = 1) -> None:
        """Do nothing: no state depends on this event."""

    def idle(self, worker: str) -> None:
        """Do nothing: no state depends on this event."""

    def rewound(self) -> None:
        """Do nothing: no state depends on this event."""

    def may_start(self, worker: str, in_flight: int = 0) -> bool:
        """Return True."""
        return True

    def waiting_for(self, worker: str, in_flight: int = 0) -> tuple[str, ...]:
        """Return no worker."""
        return ()

    def must_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Return False: a task requires no particular update."""
        return False

    def will_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Return False."""
        return False

    def round_parts(self, workers: int) -> int:
        """Return 1: every batch is a separate update."""
        return 1

    def merge_count(self, workers: int) -> int:
        """Return 1: every gradient is a separate update."""
        return 1
