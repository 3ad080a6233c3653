"""The interface of a task policy, and the moment of an epoch that it decides on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.throughput import Speeds


class LeaseHolder(Protocol):
    """A worker that may hold tasks.

    Attributes:
        name: Name within the job.
        leased_at: Time at which it got the tasks it holds.
        seen_at: Time of its last report.
        in_flight: Numbers of those tasks that it has begun.
    """

    name: str
    leased_at: float
    seen_at: float
    in_flight: frozenset[int]


@dataclass(frozen=True)
class EpochView:
    """The rest of an epoch at one moment.

    Attributes:
        workers: Workers that are ready.
        book: Tasks of the epoch.
        speeds: Measured speeds of the workers.
        size_of: Samples of a worker's next step, by its name.
        reference: Samples of the reference batch.
        now: Time of the moment, in seconds.
    """

    workers: Sequence[LeaseHolder]
    book: LeaseBook
    speeds: Speeds
    size_of: Callable[[str], int]
    reference: int
    now: float


class TaskPolicy(Protocol):
    """Divides an epoch among workers, and limits single leases. One instance serves one job.

    Attributes:
        name: Name on the axis.
        divides: Whether each worker gets a share of the epoch that is reserved for it.
        ends_together: Whether workers finish an epoch within a step of each other.
        depends_on_speed: Whether speeds decide who does what; this is impossible for batches that a client feeds.
    """

    name: str
    divides: bool
    ends_together: bool
    depends_on_speed: bool

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return each worker's share of an epoch, on any scale; None while it is unknown, or if there are none."""
        ...

    def limit(self, size: int, worker: LeaseHolder, epoch: EpochView) -> int:
        """Return how many of the ``size`` tasks of a lease the worker gets; 0: it waits, others finish them sooner."""
        ...

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return whether either all waiting workers may go on or none; the argument is the consistency policy's."""
        ...
