"""The tasks that workers hold, and those of lost workers that the shards may have applied."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from nfdt.schedulers.tasks import Task


class HeldTasks:
    """Tasks by worker: held by one that lives, or doubtful, because the worker was lost with them."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Task]] = {}
        self._doubtful: dict[str, list[Task]] = {}

    def __len__(self) -> int:
        """Return the number of tasks, held and doubtful."""
        return sum(map(len, (*self._held.values(), *self._doubtful.values())))

    def __iter__(self) -> Iterator[Task]:
        """Iterate over all tasks, held and doubtful."""
        yield from chain(*(tasks.values() for tasks in self._held.values()), *self._doubtful.values())

    @property
    def holders(self) -> tuple[str, ...]:
        """The workers that hold tasks."""
        return tuple(worker for worker, tasks in self._held.items() if tasks)

    def add(self, worker: str, tasks: Iterable[Task]) -> None:
        """Give tasks to a worker."""
        self._held.setdefault(worker, {}).update((task.task, task) for task in tasks)

    def of(self, worker: str, *, begun: Collection[int] = ()) -> tuple[Task, ...]:
        """Return the tasks that the worker holds, without those whose numbers are in ``begun``."""
        return tuple(task for number, task in self._held.get(worker, {}).items() if number not in begun)

    def pop(self, worker: str, number: int) -> Task | None:
        """Remove and return a task of the worker; None if it does not hold it."""
        return self._held.get(worker, {}).pop(number, None)

    def take(self, worker: str, *, begun: Collection[int] = ()) -> list[Task]:
        """Remove and return the tasks that the worker holds, without those whose numbers are in ``begun``."""
        held = self._held.pop(worker, {})
        self._held[worker] = {number: task for number, task in held.items() if number in begun}
        return [task for number, task in held.items() if number not in begun]

    def doubt(self, worker: str) -> int:
        """Make the tasks of a lost worker doubtful; return their number."""
        if tasks := self.take(worker):
            self._doubtful[worker] = tasks
        return len(tasks)

    def doubtful(self, worker: str) -> tuple[Task, ...]:
        """Return the doubtful tasks of a lost worker."""
        return tuple(self._doubtful.get(worker, ()))

    def resolve(self, worker: str) -> list[Task]:
        """Remove and return the doubtful tasks of a lost worker."""
        return self._doubtful.pop(worker, [])

    def clear(self) -> list[Task]:
        """Remove and return all tasks."""
        tasks = list(self)
        self._held.clear()
        self._doubtful.clear()
        return tasks
