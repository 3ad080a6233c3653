"""The interface of a task policy, and the view of an epoch that it decides on."""

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
        leased_at: Time at which it begins the tasks that it holds.
        free_at: Time at which it is done with what it computed at its last report.
        seen_at: Time of its last report.
        in_flight: Numbers of the held tasks that it has begun.
    """

    name: str
    leased_at: float
    free_at: float
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
        now: Current time, in seconds.
        samples_per_s: Sum of the speeds of all measured workers, not quite up to date; 0 before any is measured.
    """

    workers: Sequence[LeaseHolder]
    book: LeaseBook
    speeds: Speeds
    size_of: Callable[[str], int]
    reference: int
    now: float
    samples_per_s: float = 0.0


class TaskPolicy(Protocol):
    """Rule that divides an epoch among workers and limits single leases. One instance serves one job.

    Attributes:
        name: Name on the axis.
        divides: Whether a share of the epoch is reserved for each worker.
        ends_together: Whether workers finish an epoch within a step of each other.
        depends_on_speed: Whether tasks are assigned by speed; this is impossible for batches that a client feeds.
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
        """Return how many of ``size`` tasks the worker gets; 0: it waits, because others finish them sooner."""
        ...

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return whether waiting workers can proceed only all at once; the argument is the consistency policy's."""
        ...
