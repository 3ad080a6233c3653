"""Order of the jobs that wait for slots: owners share the workers fairly, and each orders its own jobs by priority."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QueuedJob:
    """Job that waits, or runs.

    Attributes:
        job_id: The job.
        owner: Its owner.
        workers: Number of its workers.
        priority: Among the jobs of its owner, those of a higher priority start first.
    """

    job_id: str
    owner: str
    workers: int
    priority: int = 0


@dataclass(frozen=True)
class Quota:
    """Limits of one owner; None: no limit.

    Attributes:
        jobs: Largest number of jobs that run at a time.
        workers: Largest number of their workers together.
    """

    jobs: int | None = None
    workers: int | None = None

    def __str__(self) -> str:
        limits = {"jobs": self.jobs, "workers": self.workers}
        texts = [f"{limit} {what}" for what, limit in limits.items() if limit is not None]
        return f"The quota is {' and '.join(texts) or 'unlimited'} at a time"

    def admits(self, job: QueuedJob, running: Iterable[QueuedJob]) -> bool:
        """Whether a job may run beside those of its owner that do."""
        own = [one for one in running if one.owner == job.owner]
        workers = job.workers + sum(one.workers for one in own)
        return (self.jobs is None or len(own) < self.jobs) and (self.workers is None or workers <= self.workers)


def fair_order(waiting: Sequence[QueuedJob], running: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Return waiting jobs, given in the order of their submission, in the order in which they start.

    The next job is one of the owner with the fewest workers, those of jobs before it in the queue included. Among
    owners with equally many, it is the one whose job was submitted first. Of an owner's jobs, it is the oldest of the
    highest priority.
    """
    workers: dict[str, int] = {}
    for job in running:
        workers[job.owner] = workers.get(job.owner, 0) + job.workers
    places = {job.job_id: place for place, job in enumerate(waiting)}
    queues: dict[str, list[QueuedJob]] = {}
    for job in sorted(waiting, key=lambda job: (-job.priority, places[job.job_id])):
        queues.setdefault(job.owner, []).append(job)
    order: list[QueuedJob] = []
    while queues:
        owner = min(queues, key=lambda owner: (workers.get(owner, 0), places[queues[owner][0].job_id]))
        job = queues[owner].pop(0)
        if not queues[owner]:
            del queues[owner]
        workers[owner] = workers.get(owner, 0) + job.workers
        order.append(job)
    return order


def expected_starts(
    order: Sequence[QueuedJob], free: int, ends: Sequence[tuple[float, int]]
) -> Mapping[str, float | None]:
    """Estimate in how many seconds each waiting job starts; None: unknown.

    How long waiting jobs will run is unknown, so that a job that needs their slots has no estimate.

    Args:
        order: The waiting jobs; none passes another.
        free: Number of free worker slots.
        ends: For each running job, the seconds that it still takes, and the workers that it frees.
    """
    coming, starts, at = sorted(ends), dict[str, float | None](), 0.0
    known = True
    for job in order:
        while free < job.workers and coming:
            at, freed = coming.pop(0)
            free += freed
        known = known and free >= job.workers
        free -= job.workers
        starts[job.job_id] = at if known else None
    return starts
