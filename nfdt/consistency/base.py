"""The interface of a consistency policy, which decides which worker may proceed. No clock, no lock."""

from __future__ import annotations

from typing import Protocol

from nfdt.core.specs.axis_facts import ConsistencyFacts


class ConsistencyPolicy(Protocol):
    """Takes the events of workers; decides which of them may start its next task.

    Attributes:
        name: Name on the axis.
        facts: Properties that do not depend on what happens.
        lease_limit: Most tasks of one lease; None: the policy sets no limit.
    """

    name: str
    facts: ConsistencyFacts
    lease_limit: int | None

    def joined(self, worker: str) -> None:
        """The worker takes part from now on."""
        ...

    def left(self, worker: str) -> None:
        """The worker is gone; it blocks no other. Unknown workers are no error."""
        ...

    def started(self, worker: str, tasks: int = 1) -> None:
        """A lease of so many tasks was granted."""
        ...

    def finished(self, worker: str, tasks: int = 1) -> None:
        """The worker reported so many tasks."""
        ...

    def idle(self, worker: str) -> None:
        """Nothing is left for the worker in this epoch: it blocks no other until it starts again."""
        ...

    def may_start(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the worker may start its next task now, having so many begun that are not finished."""
        ...

    def waiting_for(self, worker: str, in_flight: int = 0) -> tuple[str, ...]:
        """Whom the worker waits for when it may not start; else empty."""
        ...

    def must_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the weights that the worker holds may lack updates that its next task must see.

        It holds the answer to the newest push that it has reported; ``in_flight`` as in :meth:`may_start`.
        """
        ...

    def will_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the answer to the push of the task that has just started is certainly too old for any later task.

        ``in_flight`` tasks were begun and not finished when it started.
        """
        ...

    def round_parts(self, workers: int) -> int:
        """Local batches that form one synchronous global batch; 1 for asynchronous policies."""
        ...

    def merge_count(self, workers: int) -> int:
        """Arriving gradients averaged into one update; 1 where every gradient is one."""
        ...
