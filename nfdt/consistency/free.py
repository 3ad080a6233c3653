"""Asynchronous training without a bound (ASP): no worker waits for another."""

from __future__ import annotations

from nfdt.core.specs.axis_facts import CONSISTENCY_FACTS


class Free:
    """No worker waits for another: asynchronous training (ASP)."""

    name = "free"
    facts = CONSISTENCY_FACTS[name]
    lease_limit: int | None = None

    def joined(self, worker: str) -> None:
        """Nothing to note."""

    def left(self, worker: str) -> None:
        """Nothing to note."""

    def started(self, worker: str, tasks: int = 1) -> None:
        """Nothing to note."""

    def finished(self, worker: str, tasks: int = 1) -> None:
        """Nothing to note."""

    def idle(self, worker: str) -> None:
        """Nothing to note."""

    def may_start(self, worker: str, in_flight: int = 0) -> bool:
        """Always."""
        return True

    def waiting_for(self, worker: str, in_flight: int = 0) -> tuple[str, ...]:
        """Empty."""
        return ()

    def must_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Never: a task needs no particular update."""
        return False

    def will_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Never."""
        return False

    def round_parts(self, workers: int) -> int:
        """1: every batch is an update of its own."""
        return 1

    def merge_count(self, workers: int) -> int:
        """1: every gradient is an update of its own."""
        return 1
