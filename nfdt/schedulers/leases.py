"""Leases of tasks: every task is computed exactly once, or again by another worker if its own is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace

from nfdt.schedulers.sources import TaskSource
from nfdt.schedulers.tasks import Task


class LeaseBook:
    """The state of one epoch's tasks: unleased, leased, finished.

    A task is leased to one worker at a time; only that worker can finish it. :meth:`lose` requeues a lost
    worker's tasks before all others, :meth:`give_back` those that it has not begun.

    Args:
        source: Source of the tasks.
        rounds: Whether tasks form rounds: round r + 1 is leased only after every part of round r is finished by any
            worker; a round is a step.
        step_samples: Number of samples in a step of the epoch; None: each task (or round) is a step.
        counted: Whether workers count the samples of a task, whose number is not known before.
    """

    def __init__(
        self, source: TaskSource, *, rounds: bool = False, step_samples: int | None = None, counted: bool = False
    ) -> None:
        self.samples_finished = 0
        self._finished = 0  # tasks, or rounds
        self._source = source
        self._rounds = rounds
        self._step_samples = step_samples
        self._counted = counted
        self._ready: deque[Task] = deque()  # taken from the source, not leased: returned or parts of the open round
        self._held: dict[str, dict[int, Task]] = {}
        self._round_begun = False

    def issue(self, worker: str, limit: int = 1, part: int | None = None) -> tuple[Task, ...]:
        """Lease up to ``limit`` tasks to the worker, returned ones first; empty if none is available now.

        ``part`` is the preferred part of a round for this worker, if it is still available.
        """
        self._open_round()
        tasks = [self._pick(part) for _ in range(min(limit, len(self._ready)))]
        if not tasks and not self._rounds:
            tasks = self._source.take(worker, limit)
        if tasks:
            self._round_begun = True
            self._held.setdefault(worker, {}).update((t.task, t) for t in tasks)
        return tuple(tasks)

    def held(self, worker: str, *, begun: Collection[int] = ()) -> tuple[Task, ...]:
        """Return the tasks that the worker holds, without those whose numbers are in ``begun``."""
        return tuple(task for number, task in self._held.get(worker, {}).items() if number not in begun)

    def join(self, worker: str) -> None:
        """Let a worker take part in the epoch."""
        self._source.join(worker)

    def holders(self) -> tuple[str, ...]:
        """Return the workers that hold tasks."""
        return tuple(w for w, tasks in self._held.items() if tasks)

    @property
    def leased(self) -> int:
        """Number of tasks that are held."""
        return sum(map(len, self._held.values()))

    def finish(self, worker: str, task: int, samples: int | None = None) -> Task | None:
        """Finish and return a task that the worker holds; None if the worker does not hold it (any more).

        ``samples`` is the number that the worker has counted.
        """
        done = self._held.get(worker, {}).pop(task, None)
        if done is None:
            return None
        if self._counted and samples is not None:
            done = replace(done, samples=samples)
        self.samples_finished += done.samples
        if not self._rounds or not self._in_flight:
            self._finished += 1
            self._round_begun = False
        return done

    def divide(self, weights: Mapping[str, float]) -> None:
        """Reserve the unleased tasks for these workers, in proportion."""
        self._source.divide(weights)

    def give_back(self, worker: str, *, begun: Collection[int] = ()) -> int:
        """Requeue the tasks that the worker holds but has not begun; return their number."""
        held = self._held.pop(worker, {})
        tasks = self._source.returned([task for number, task in held.items() if number not in begun])
        self._held[worker] = {number: task for number, task in held.items() if number in begun}
        self._ready.extendleft(reversed(tasks))
        return len(tasks)

    def lose(self, worker: str) -> int:
        """Requeue the tasks of a lost worker; return their number. A second call returns 0."""
        self._source.release(worker)
        return self.give_back(worker)

    def stop(self) -> None:
        """Drop unleased tasks; a round that has begun is still completed."""
        self._source.drop()
        if not (self._rounds and self._round_begun):
            self._ready.clear()

    def available(self, worker: str) -> bool:
        """Whether :meth:`issue` would lease a task to the worker now."""
        self._open_round()
        return bool(self._ready) or (not self._rounds and self._source.available(worker))

    @property
    def decided(self) -> bool:
        """Whether the existence of another task is known: one is available, or none will come."""
        return self.done or self.available("")

    def exhausted(self, worker: str) -> bool:
        """Whether no task is left for the worker, unless another worker is lost."""
        return not self._ready and self._source.exhausted(worker)

    @property
    def steps_finished(self) -> int:
        """Number of finished steps of the epoch; a short last one counts once all tasks are finished."""
        if self._step_samples is None:
            return self._finished
        whole, rest = divmod(self.samples_finished, self._step_samples)
        return whole + bool(rest and self.done)

    @property
    def remaining(self) -> int:
        """Number of unleased rounds, as far as known, and of returned tasks."""
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
