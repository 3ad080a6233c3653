"""Stale synchronous parallel (SSP): nobody runs more than s finished steps ahead of the slowest."""

from __future__ import annotations

from collections import Counter

from nfdt.consistency.free import Free


class BoundedStaleness(Free):
    """A worker may start while it is at most ``bound`` steps ahead of the slowest active one.

    These are the steps it has finished, and those it overlaps, over the steps that the slowest has finished.

    A worker that joins, or comes back after it was idle, starts level with the slowest active one: it
    has just pulled fresh weights, and must neither hold the others up nor be held up for its past.
    """

    name = "ssp"
    lease_limit: int | None = 1

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._steps: dict[str, int] = {}
        self._idle: set[str] = set()
        self._levels: Counter[int] = Counter()  # how many active workers have done so many steps; there are few levels

    def joined(self, worker: str) -> None:
        """Count the worker's steps from where the slowest active worker is."""
        self._rest(worker)
        self._enter(worker, min(self._levels, default=self._steps.get(worker, 0)))

    def left(self, worker: str) -> None:
        """Forget the worker."""
        self._rest(worker)
        self._steps.pop(worker, None)
        self._idle.discard(worker)

    def started(self, worker: str, tasks: int = 1) -> None:
        """The worker is active (again)."""
        if worker not in self._steps or worker in self._idle:
            self.joined(worker)

    def finished(self, worker: str, tasks: int = 1) -> None:
        """The worker is so many steps further."""
        if worker in self._idle:
            self._steps[worker] += tasks
        elif worker in self._steps:
            self._rest(worker)
            self._enter(worker, self._steps[worker] + tasks)

    def idle(self, worker: str) -> None:
        """The worker blocks nobody until it starts again."""
        self._rest(worker)

    def may_start(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the worker is at most ``bound`` steps ahead of the slowest active one."""
        if worker not in self._steps or worker in self._idle:
            return True
        return self._steps[worker] + in_flight - min(self._levels) <= self.bound

    def waiting_for(self, worker: str, in_flight: int = 0) -> tuple[str, ...]:
        """The active workers that are more than ``bound`` steps behind."""
        if self.may_start(worker, in_flight):
            return ()
        limit = self._steps[worker] + in_flight - self.bound
        return tuple(sorted(w for w, steps in self._steps.items() if w not in self._idle and steps < limit))

    def _enter(self, worker: str, steps: int) -> None:
        """The worker is active, and has done so many steps."""
        self._idle.discard(worker)
        self._steps[worker] = steps
        self._levels[steps] += 1

    def _rest(self, worker: str) -> None:
        """The worker is active no more, if it was."""
        if worker not in self._steps or worker in self._idle:
            return
        self._idle.add(worker)
        level = self._steps[worker]
        self._levels[level] -= 1
        if not self._levels[level]:
            del self._levels[level]
