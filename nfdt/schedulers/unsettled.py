"""Finished tasks whose updates the newest snapshot of the shards may lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nfdt.schedulers.tasks import Task


@dataclass(frozen=True)
class UnsettledTask:
    """A finished task, its worker, the sequence number of its push, and its number in the order of reports."""

    task: Task
    worker: str
    sequence: int
    number: int


class UnsettledTasks:
    """Finished tasks in the order of their reports; they hold the data of streamed batches."""

    def __init__(self) -> None:
        self._entries: list[UnsettledTask] = []
        self._added = 0
        self._marked = 0
        self._contained: Mapping[str, int] = {}

    def add(self, task: Task, worker: str, sequence: int) -> bool:
        """Add a finished task; return False if the last stored snapshot contains it already."""
        if sequence <= self._contained.get(worker, 0):
            return False
        self._added += 1
        self._entries.append(UnsettledTask(task, worker, sequence, self._added))
        return True

    def mark(self) -> None:
        """Record that a snapshot begins: it contains all pushes reported so far."""
        self._marked = self._added

    def settle(self, contained: Mapping[str, int] | None) -> list[Task]:
        """Remove and return the tasks that a stored snapshot contains.

        Args:
            contained: Sequence number of each worker's last push in the snapshot. Of a worker without a number, which
                the shards have forgotten, the tasks reported before :meth:`mark` are contained. None: all tasks are.
        """
        if contained is not None:
            self._contained = contained
        settled = [entry for entry in self._entries if contained is None or self._is_in(entry, contained)]
        numbers = {entry.number for entry in settled}
        self._entries = [entry for entry in self._entries if entry.number not in numbers]
        return [entry.task for entry in settled]

    def clear(self) -> list[Task]:
        """Remove and return all tasks: the shards have gone back, and the numbers of pushes begin again."""
        self._contained = {}
        tasks, self._entries = [entry.task for entry in self._entries], []
        return tasks

    @property
    def data_bytes(self) -> int:
        """Size of the streamed batches."""
        return sum(len(entry.task.data) for entry in self._entries)

    @property
    def samples(self) -> int:
        """Number of samples in the tasks."""
        return sum(entry.task.samples for entry in self._entries)

    def _is_in(self, entry: UnsettledTask, contained: Mapping[str, int]) -> bool:
        if entry.worker in contained:
            return entry.sequence <= contained[entry.worker]
        return entry.number <= self._marked
