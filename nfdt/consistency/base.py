"""The base of all consistency policies, which decide which workers may proceed. It has no clock and no lock."""

from __future__ import annotations

from typing import ClassVar

from nfdt.core.specs.presets import ConsistencyFacts


class ConsistencyPolicy:
    """State machine that receives the events of workers and decides which of them may start its next task.

    The methods here are those of a policy under which no worker waits for another and every gradient is an update.

    Attributes:
        name: Name on the axis.
        facts: Static properties, which do not depend on events.
        lease_limit: Maximum number of tasks in one lease; None: no limit.
    """

    name: ClassVar[str]
    facts: ClassVar[ConsistencyFacts]
    lease_limit: int | None = None

    def joined(self, worker: str) -> None:
        """Add a worker."""

    def left(self, worker: str) -> None:
        """Remove a worker, which then blocks no other. Unknown workers are no error."""

    def started(self, worker: str, tasks: int = 1) -> None:
        """Record a granted lease of ``tasks`` tasks."""

    def finished(self, worker: str, tasks: int = 1) -> None:
        """Record a report of ``tasks`` finished tasks."""

    def idle(self, worker: str) -> None:
        """Record that no task is left for the worker in this epoch: it blocks no other until it starts again."""

    def rewound(self) -> None:
        """Record that the weights have gone back to an earlier state, and that no task is begun any more."""

    def may_start(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the worker may start its next task now, with ``in_flight`` tasks begun but not finished."""
        return True

    def waiting_for(self, worker: str, in_flight: int = 0) -> tuple[str, ...]:
        """Return the workers for which this one waits if it may not start; else empty."""
        return ()

    def must_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Return whether the weights that the worker holds may lack updates that its next task requires.

        It holds the reply to the newest push that it has reported; ``in_flight`` as in :meth:`may_start`.
        """
        return False

    def will_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Return whether the reply to the push of the task that has just started is certainly too old for a later task.

        ``in_flight`` is the number of tasks that were begun but not finished when it started.
        """
        return False

    def round_parts(self, workers: int) -> int:
        """Return the number of local batches in one synchronous global batch; 1 for asynchronous policies."""
        return 1

    def merge_count(self, workers: int) -> int:
        """Return the number of gradients averaged into one update; 1 if every gradient is an update."""
        return 1
