"""Task policies, by name: the distribution of an epoch's tasks to workers over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.proportions import Runner, steps_to_share
from nfdt.schedulers.throughput import Speeds

SURE_STEPS = 10  # steps of each worker before an epoch is divided permanently
STALE_STEPS = 20  # age of a measured speed, in step times of its worker, after which it is always measured again
EXACT = 64  # workers for which the rest of an epoch is divided at every lease; each time as many more, that much rarer


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


class TaskPolicy:
    """Rule that divides an epoch among workers and limits single leases. One instance serves one job.

    The methods here are those of one pool from which all workers take tasks until it is empty.

    Attributes:
        name: Name on the axis.
        divides: Whether a share of the epoch is reserved for each worker.
        ends_together: Whether workers finish an epoch within a step of each other.
        depends_on_speed: Whether tasks are assigned by speed; this is impossible for batches that a client feeds.
    """

    name: ClassVar[str]
    divides: bool = False
    ends_together: bool = False
    depends_on_speed: bool = False

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return each worker's share of an epoch, on any scale; None while it is unknown, or if there are none."""
        return None

    def limit(self, size: int, worker: LeaseHolder, epoch: EpochView) -> int:
        """Return how many of ``size`` tasks the worker gets; 0: it waits, because others finish them sooner."""
        return size

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return whether waiting workers can proceed only all at once; the argument is the consistency policy's."""
        return consistency_alike or not self.divides


class DynamicTasks(TaskPolicy):
    """Small pieces of one pool, from which all workers take tasks until it is empty."""

    name = "dynamic"


class StaticTasks(TaskPolicy):
    """Equal shares for all workers, reserved when the epoch begins."""

    name = "static"
    divides = True

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return equal shares."""
        return dict.fromkeys(workers, 1.0)


class ProportionalTasks(TaskPolicy):
    """Shares in proportion to the speeds of workers, as soon as all speeds are known."""

    name = "proportional"
    divides = True
    depends_on_speed = True

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return the samples per second of each worker; None before all speeds are known."""
        if any(speeds.of(worker).steps < SURE_STEPS for worker in workers):
            return None
        lines = {worker: speeds.of(worker).step_time for worker in workers}
        return {worker: line.samples_per_s(size_of(worker)) for worker, line in lines.items() if line}


class FinishTogetherTasks(TaskPolicy):
    """Dynamic tasks in which a worker gets only as many steps as it finishes before all others have finished theirs."""

    name = "finish-together"
    ends_together = True
    depends_on_speed = True

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}  # left of the last division, by worker
        self._uses = self._rest = 0  # of that division, and the tasks that it divided

    def limit(self, size: int, worker: LeaseHolder, epoch: EpochView) -> int:
        """Return the worker's part of the rest if the rest is small."""
        if not self._ends_soon(worker.name, size, epoch):
            return size
        line = epoch.speeds.of(worker.name).now
        if line is None:
            return min(size, 1)
        if self._uses <= 0 or worker.name not in self._steps or epoch.book.remaining > self._rest:
            self._divide(worker, epoch)
        self._uses -= 1
        steps = min(size, self._steps[worker.name])
        self._steps[worker.name] -= steps
        stale_s = STALE_STEPS * line.seconds(epoch.size_of(worker.name))
        return steps or int(epoch.now - worker.leased_at > stale_s)  # occasional steps detect a speed-up

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return False: a slow worker may wait while a fast one gets a step."""
        return False

    def _ends_soon(self, worker: str, size: int, epoch: EpochView) -> bool:
        """Whether the worker's part of the rest may be under ``size`` steps, if speeds double before the next sum."""
        step_s = epoch.speeds.of(worker).now
        if step_s is None or not epoch.samples_per_s:
            return True
        least_s = epoch.book.remaining * epoch.reference / (2 * epoch.samples_per_s)
        return least_s < (size + 1) * step_s.seconds(epoch.size_of(worker))

    def _divide(self, worker: LeaseHolder, epoch: EpochView) -> None:
        """Divide the rest of the epoch so that all end together: for many workers once in several calls."""
        runners = {w.name: runner for w in epoch.workers if (runner := _runner(w, w is worker, epoch))}
        steps = steps_to_share(epoch.book.remaining * epoch.reference, list(runners.values()))
        self._steps = dict(zip(runners, steps, strict=True))
        self._uses, self._rest = max(1, len(runners) // EXACT), epoch.book.remaining


def _runner(worker: LeaseHolder, asks: bool, epoch: EpochView) -> Runner | None:
    line = epoch.speeds.of(worker.name).now
    if line is None:
        return None
    held = epoch.book.held(worker.name, begun=worker.in_flight)
    if held:
        left_s = worker.leased_at + sum(line.seconds(task.samples) for task in held) - epoch.now
        free_in_s = abs(left_s)  # assume that a late worker needs as long again
    else:
        computing_s = max(0.0, worker.free_at - epoch.now)
        silent_s = max(0.0, epoch.now - max(worker.free_at, worker.seen_at))
        free_in_s = computing_s if asks else computing_s + silent_s  # so is a silent one
    size = epoch.size_of(worker.name)
    return Runner(free_in_s, line.seconds(size), size)


TASK_POLICIES: dict[str, Callable[[], TaskPolicy]] = {
    "static": StaticTasks,
    "proportional": ProportionalTasks,
    "dynamic": DynamicTasks,
    "finish-together": FinishTogetherTasks,
}


def make_task_policy(name: str) -> TaskPolicy:
    """Return a new task policy of this name on the axis."""
    return TASK_POLICIES[name]()
