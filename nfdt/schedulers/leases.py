"""Who holds which task: every task is done exactly once, or again by somebody else when its worker is lost."""

from __future__ import annotations

from collections import deque

from nfdt.schedulers.sources import TaskSource
from nfdt.schedulers.tasks import Task


class LeaseBook:
    """The state of one epoch's tasks: not handed out, leased, finished.

    A task is leased to one worker at a time; only that worker can finish it. :meth:`lose` puts a lost
    worker's tasks in front of all others. With ``rounds``, round r + 1 is handed out only after every
    part of round r is finished, whoever did it.
    """

    def __init__(self, source: TaskSource, *, rounds: bool = False) -> None:
        self.steps_finished = 0
        self.samples_finished = 0
        self._source = source
        self._rounds = rounds
        self._ready: deque[Task] = deque()  # taken from the source, not leased: returned or parts of the open round
        self._held: dict[str, dict[int, Task]] = {}
        self._round_begun = False

    def issue(self, worker: str, limit: int = 1, part: int | None = None) -> tuple[Task, ...]:
        """Lease up to ``limit`` tasks to the worker, returned ones first; empty when there is none now.

        ``part`` is the part of a round this worker should have if it is still to be had.
        """
        self._open_round()
        tasks = [self._pick(part) for _ in range(min(limit, len(self._ready)))]
        if not tasks and not self._rounds:
            tasks = self._source.take(worker, limit)
        if tasks:
            self._round_begun = True
            self._held.setdefault(worker, {}).update((t.task, t) for t in tasks)
        return tuple(tasks)

    def held(self, worker: str) -> tuple[Task, ...]:
        """The tasks the worker holds."""
        return tuple(self._held.get(worker, {}).values())

    def holders(self) -> tuple[str, ...]:
        """The workers that hold tasks."""
        return tuple(w for w, tasks in self._held.items() if tasks)

    def finish(self, worker: str, task: int) -> Task | None:
        """The worker has done a task it holds; None if it does not hold it (any more)."""
        done = self._held.get(worker, {}).pop(task, None)
        if done is None:
            return None
        self.samples_finished += done.samples
        if not self._rounds or not self._in_flight:
            self.steps_finished += 1
            self._round_begun = False
        return done

    def lose(self, worker: str) -> int:
        """The worker is gone: its tasks go back. Returns how many; a second call returns 0."""
        tasks = self._held.pop(worker, {})
        self._ready.extendleft(reversed(tasks.values()))
        self._source.release(worker)
        return len(tasks)

    def stop(self) -> None:
        """Drop what has not been leased; a round that somebody has begun is still completed."""
        self._source.drop()
        if not (self._rounds and self._round_begun):
            self._ready.clear()

    def available(self, worker: str) -> bool:
        """Whether :meth:`issue` would give the worker something now."""
        self._open_round()
        return bool(self._ready) or (not self._rounds and self._source.available(worker))

    def exhausted(self, worker: str) -> bool:
        """Whether nothing is left for the worker, unless somebody else is lost."""
        return not self._ready and self._source.exhausted(worker)

    @property
    def remaining(self) -> int:
        """Rounds nobody holds, as far as known, and tasks that came back."""
        return self._source.remaining + len(self._ready)

    @property
    def done(self) -> bool:
        """Whether every task is finished and none will come."""
        return self._source.finished and not self._ready and not self._leased

    @property
    def _leased(self) -> bool:
        return any(self._held.values())

    @property
    def _in_flight(self) -> bool:
        return bool(self._ready) or self._leased

    def _open_round(self) -> None:
        if self._rounds and not self._in_flight:
            self._ready.extend(self._source.take_round())

    def _pick(self, part: int | None) -> Task:
        for index, task in enumerate(self._ready):
            if self._rounds and task.part == part:
                del self._ready[index]
                return task
        return self._ready.popleft()
