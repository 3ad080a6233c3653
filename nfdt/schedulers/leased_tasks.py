"""Tasks after they are leased: held by a worker, doubtful after its loss, finished, and settled by a snapshot."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import chain

from nfdt.core.specs.job import EpochProgress
from nfdt.schedulers.ranges import RowSet
from nfdt.schedulers.tasks import Task


class HeldTasks:
    """Tasks by worker: held by one or several that live, or doubtful, because the only one was lost with them."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Task]] = {}
        self._shared = set[int]()  # numbers that several workers have held
        self._doubtful: dict[str, list[Task]] = {}

    def __len__(self) -> int:
        """Return the number of tasks, held and doubtful."""
        return len({*chain(*self._held.values())}) + sum(map(len, self._doubtful.values()))

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return any(self._held.values()) or any(self._doubtful.values())

    def __iter__(self) -> Iterator[Task]:
        """Iterate over all tasks, held and doubtful, each once."""
        yield from self.leased()
        yield from chain(*self._doubtful.values())

    def leased(self) -> list[Task]:
        """Return the held tasks, each once."""
        return list({number: task for tasks in self._held.values() for number, task in tasks.items()}.values())

    @property
    def holders(self) -> tuple[str, ...]:
        """The workers that hold tasks."""
        return tuple(worker for worker, tasks in self._held.items() if tasks)

    def add(self, worker: str, tasks: Iterable[Task]) -> None:
        """Give tasks to a worker."""
        self._held.setdefault(worker, {}).update((task.task, task) for task in tasks)

    def share(self, worker: str, tasks: Collection[Task]) -> None:
        """Give tasks to one more worker; those that hold them keep them."""
        self._shared.update(task.task for task in tasks)
        self.add(worker, tasks)

    def of(self, worker: str, *, begun: Collection[int] = ()) -> tuple[Task, ...]:
        """Return the tasks that the worker holds, without those whose numbers are in ``begun``."""
        return tuple(task for number, task in self._held.get(worker, {}).items() if number not in begun)

    def holds(self, worker: str, number: int) -> bool:
        """Return whether the worker holds a task."""
        return number in self._held.get(worker, {})

    def holders_of(self, number: int) -> tuple[str, ...]:
        """Return the workers that hold a task."""
        return tuple(worker for worker, tasks in self._held.items() if number in tasks)

    def others(self, worker: str, number: int) -> tuple[str, ...]:
        """Return the other workers that hold a task; none if it was never shared."""
        holders = self.holders_of(number) if number in self._shared else ()
        return tuple(holder for holder in holders if holder != worker)

    def pop(self, worker: str, number: int) -> Task | None:
        """Remove a task of the worker, also from others that hold it, and return it; None if it does not hold it."""
        task = self._held.get(worker, {}).pop(number, None)
        if task is not None and number in self._shared:
            self._shared.discard(number)
            for tasks in self._held.values():
                tasks.pop(number, None)
        return task

    def take(self, worker: str, *, begun: Collection[int] = ()) -> list[Task]:
        """Remove the tasks that the worker holds but those in ``begun``; return those that no other worker holds."""
        held = self._held.pop(worker, {})
        self._held[worker] = {number: task for number, task in held.items() if number in begun}
        taken = [task for number, task in held.items() if number not in begun]
        return [task for task in taken if task.task not in self._shared or not self.holders_of(task.task)]

    def doubt(self, worker: str) -> int:
        """Make the tasks that only a lost worker holds doubtful; return their number."""
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
        self._shared.clear()
        self._doubtful.clear()
        return tasks


class Settlement:
    """Finished tasks, with the data of streamed batches, until a stored snapshot contains them; and the rows it has.

    A snapshot consists of a part for each shard, which are not taken at the same moment: a task may be in some of
    them. Of a job with rounds it contains whole rounds, those finished before :meth:`mark`.
    """

    def __init__(self) -> None:
        self._unsettled: list[Task] = []
        self._marked = 0
        self._contained: Sequence[Container[int]] = ()
        self._rows = RowSet()
        self._round = 0

    def begin(self, progress: EpochProgress) -> None:
        """Begin with the rows and rounds of a snapshot."""
        self._rows, self._round = RowSet(progress.rows), progress.round

    def finished(self, task: Task) -> None:
        """Add a finished task."""
        if self.is_contained(task):
            self._settle([task])
        else:
            self._unsettled.append(task)

    @property
    def unsettled_bytes(self) -> int:
        """Size of the streamed batches that are finished and not settled."""
        return sum(len(task.data) for task in self._unsettled)

    def mark(self) -> None:
        """Record that a snapshot begins: of a job with rounds, it contains all tasks finished so far."""
        self._marked = len(self._unsettled)

    def is_contained(self, task: Task) -> bool:
        """Whether all parts of the newest snapshot contain the task."""
        return bool(self._contained) and all(task.task in shard for shard in self._contained)

    def is_partly_contained(self, task: Task) -> bool:
        """Whether some parts of the newest snapshot contain the task, and others lack it."""
        return any(task.task in shard for shard in self._contained) and not self.is_contained(task)

    def settle(self, contained: Sequence[Container[int]]) -> None:
        """Settle the tasks that a stored snapshot contains; ``contained`` has those of each shard."""
        self._contained = contained
        tasks, self._unsettled = self._unsettled, []
        for task in tasks:
            self.finished(task)

    def settle_marked(self) -> None:
        """Settle the tasks finished before :meth:`mark`."""
        self._settle(self._unsettled[: self._marked])
        del self._unsettled[: self._marked]
        self._marked = 0

    def settle_all(self) -> None:
        """Settle everything that is finished."""
        self._settle(self.clear())

    def clear(self) -> list[Task]:
        """Remove and return the tasks that are not settled."""
        tasks, self._unsettled, self._marked = self._unsettled, [], 0
        return tasks

    def progress(
        self, epoch: int, first: tuple[int, int], samples: int, unreported: Iterable[Task], begun: Iterable[Task]
    ) -> EpochProgress:
        """Return what the newest snapshot contains.

        Args:
            epoch: Number of the epoch.
            first: Pass and number of its first row. The first range begins there; it is empty if that row is missing.
            samples: Samples of all finished tasks.
            unreported: Tasks that are not finished, which the snapshot may contain.
            begun: Those of them, and of the waiting ones, that some shards have applied.
        """
        more = [task for task in unreported if self.is_contained(task)]
        rows = RowSet([*self._rows.ranges, *((task.pass_index, task.start, task.stop) for task in more)]).ranges
        if not rows or rows[0][:2] != first:
            rows = ((*first, first[1]), *rows)
        samples += sum(task.samples for task in more) - sum(task.samples for task in self._unsettled)
        partly = [*filter(self.is_partly_contained, self._unsettled), *begun]
        tasks = tuple((t.task, t.pass_index, t.start, t.stop) for t in partly if not self.is_contained(t))
        return EpochProgress(epoch=epoch, samples=samples, round=self._round, rows=rows, partly=tasks)

    def _settle(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self._rows.add(task.pass_index, task.start, task.stop)
            self._round = max(self._round, task.round)
