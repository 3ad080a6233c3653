"""Tasks of the next epoch that workers begin while the last pushes of the current one are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nfdt.coordinator.epoch_plan import Epoch, EpochPlanner
from nfdt.coordinator.membership import Member
from nfdt.core.work.instructions import Wait, Work
from nfdt.core.work.tasks import Task
from nfdt.schedulers.local_steps import LocalStepSizes


class EarlyTasks:
    """Plan of the next epoch, of which each worker with steps of its own begins a task before the epoch does.

    The task ends in its epoch, and is pushed then: until then the shards have no more than the current epoch.

    Args:
        planner: Planner of the job; its position stays that of the next epoch until :meth:`adopt`.
        epoch: Number of the next epoch.
        workers: Names of the workers.
        sizes: Sizes of their tasks.
        overlap: Number of pushes that may be unanswered while a worker computes.
    """

    def __init__(
        self, planner: EpochPlanner, epoch: int, workers: Sequence[str], sizes: LocalStepSizes, overlap: int
    ) -> None:
        self._planner, self._epoch, self._sizes, self._overlap = planner, epoch, sizes, overlap
        self._begin = planner.position
        self._planned = planner.begin(epoch, 1, workers, None, sizes)
        self._end, planner.position = planner.position, self._begin

    def instruct(self, member: Member, now: float) -> Work | Wait:
        """Return the next part of a worker's task; Wait if only its last batch is left, which is one of the epoch."""
        rows = self._sizes.early_rows(member.name)
        if not rows or (task := self._task_of(member.name, now)) is None:
            return Wait()
        stop = min(task.start + member.early + rows, task.stop - self._sizes.reference)
        if stop <= task.start + member.early:
            return Wait()
        return Work(self._epoch, (replace(task, stop=stop),), overlap=self._overlap)

    def _task_of(self, worker: str, now: float) -> Task | None:
        """Return the task that a worker holds, or leases now; None: others are sooner done with all of them."""
        book, sizes = self._planned.book, self._sizes
        if held := book.held(worker):
            return held[0]
        sizes.look(now)
        for task in book.issue(worker):
            sizes.leased(worker, task.stop - task.start, now)
            return task
        return None

    def lost(self, worker: str) -> None:
        """Take back the tasks of a lost worker, which has pushed none of them."""
        self._planned.book.give_back(worker)

    def drop(self) -> None:
        """Let the epoch be planned anew: none of its tasks has a number of these."""
        if self._begin is not None and self._end is not None:
            self._planner.position = replace(self._begin, task=self._end.task)

    def adopt(self) -> Epoch:
        """Return the plan of the epoch, which begins."""
        self._planner.position = self._end
        return self._planned
