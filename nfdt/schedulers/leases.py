"""Leases of tasks: the update of every task is applied once; it is computed again only if it is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice

from nfdt.core.specs.job import EpochProgress
from nfdt.schedulers.leased_tasks import HeldTasks, Settlement
from nfdt.schedulers.sources import TaskSource
from nfdt.schedulers.tasks import Task


class LeaseBook:
    """The state of one epoch's tasks: unleased, leased, finished, settled.

    A task is leased to one worker, and by :meth:`back_up` to others while that one is late; the first of them that
    reports it finishes it. :meth:`give_back` requeues those that a worker has not begun, before all others. The tasks
    of a lost worker are doubtful until :meth:`resolve` is called with what the shards have applied of them. Tasks are
    leased again as they were, with the same numbers: a shard that has applied one does not apply it again.

    A finished task is settled once a snapshot of the shards contains its update. :meth:`rewind` requeues all tasks that
    the last snapshot lacks, because the shards have gone back to it.

    Args:
        source: Source of the tasks.
        rounds: Whether tasks form rounds: round r + 1 is leased only after every part of round r is finished by any
            worker; a round is a step.
        step_samples: Number of samples in a step of the epoch; None: each task (or round) is a step.
        counted: Whether workers count the samples of a task, whose number is not known before.
        keeps: Whether finished tasks are kept, with the data of streamed batches, until they are settled. Otherwise
            they are settled at once.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        rounds: bool = False,
        step_samples: int | None = None,
        counted: bool = False,
        keeps: bool = False,
    ) -> None:
        self.samples_finished = 0
        self._finished = 0  # tasks, or rounds
        self._source = source
        self._rounds = rounds
        self._step_samples = step_samples
        self._counted = counted
        self._keeps = keeps
        self._ready: deque[Task] = deque()  # taken from the source, not leased: returned or parts of the open round
        self._redo: deque[list[Task]] = deque()  # rounds that are leased again before those of the source
        self._held = HeldTasks()
        self._partly = set[int]()  # tasks that some shards have applied
        self._round_begun = False
        self._quiesced = False
        self._settlement = Settlement()
        self._finished_bytes = 0  # of streamed batches

    # ---- leases

    def issue(self, worker: str, limit: int = 1, part: int | None = None) -> tuple[Task, ...]:
        """Lease up to ``limit`` tasks to the worker, returned ones first; empty if none is available now.

        ``part`` is the preferred part of a round for this worker, if it is still available.
        """
        if not self._leases:
            return ()
        self._open_round()
        tasks = [self._pick(part) for _ in range(min(limit, len(self._ready)))]
        if not tasks and not self._rounds:
            tasks = self._source.take(worker, limit)
        if tasks:
            self._round_begun = True
            self._held.add(worker, tasks)
        return tuple(tasks)

    def back_up(self, worker: str, late: Container[str], limit: int) -> tuple[Task, ...]:
        """Lease up to ``limit`` tasks to the worker that only ``late`` workers hold; they keep them, too.

        Empty for parts of a round, and for tasks that only their worker can compute.
        """
        if self._rounds or not self._source.repeatable:
            return ()
        overdue = (task for task in self._held.leased() if self._is_overdue(task.task, worker, late))
        tasks = tuple(islice(overdue, limit))
        self._held.share(worker, tasks)
        return tasks

    def _is_overdue(self, task: int, worker: str, late: Container[str]) -> bool:
        holders = self._held.holders_of(task)
        return worker not in holders and all(holder in late for holder in holders)

    def held(self, worker: str, *, begun: Collection[int] = ()) -> tuple[Task, ...]:
        """Return the tasks that the worker holds, without those whose numbers are in ``begun``."""
        return self._held.of(worker, begun=begun)

    def join(self, worker: str) -> None:
        """Let a worker take part in the epoch."""
        self._source.join(worker)

    def holders(self) -> tuple[str, ...]:
        """Return the workers that hold tasks."""
        return self._held.holders

    def also_held_by(self, worker: str, task: int) -> tuple[str, ...]:
        """Return the other workers that hold a task, after :meth:`back_up`."""
        return self._held.others(worker, task)

    def is_shared(self, worker: str, task: int) -> bool:
        """Whether other workers hold a task, or have finished it: the worker does not hold it alone."""
        return not self._held.holds(worker, task) or bool(self.also_held_by(worker, task))

    @property
    def unsettled_bytes(self) -> int:
        """Size of the streamed batches that are finished and not settled."""
        return self._settlement.unsettled_bytes

    @property
    def settled_bytes(self) -> int:
        """Size of the streamed batches that are finished and no longer kept."""
        return self._finished_bytes - self.unsettled_bytes

    @property
    def leased(self) -> int:
        """Number of tasks that are held or doubtful."""
        return len(self._held)

    def finish(self, worker: str, task: int, samples: int | None = None) -> Task | None:
        """Finish and return a task, of ``samples`` if the worker counts; None if it does not hold it (any more)."""
        done = self._held.pop(worker, task)
        if done is not None:
            done = replace(done, samples=samples) if self._counted and samples is not None else done
            self._count(done)
        return done

    def _count(self, done: Task) -> None:
        self.samples_finished += done.samples
        self._finished_bytes += len(done.data)
        if self._keeps:
            self._settlement.finished(done)
        if not self._rounds or not self._in_flight:  # of a round, its last part
            self._finished += 1
            self._round_begun = False
            if self._rounds and self._quiesced:
                self._settlement.mark()

    def divide(self, weights: Mapping[str, float]) -> None:
        """Reserve the unleased tasks for these workers, in proportion."""
        self._source.divide(weights)

    def free_share(self, worker: str) -> None:
        """Let all workers take what is reserved for one that is late."""
        if self._source.repeatable:
            self._source.release(worker)

    def give_back(self, worker: str, *, begun: Collection[int] = ()) -> int:
        """Requeue the tasks that the worker holds but has not begun; return their number."""
        tasks = self._source.returned(self._held.take(worker, begun=begun))
        self._ready.extendleft(reversed(tasks))  # before all others, in their own order
        return len(tasks)

    def lose(self, worker: str) -> int:
        """Take back the tasks that only a lost worker holds; return their number. A second call returns 0.

        Parts of a round are requeued at once, because shards know them by round and part.
        """
        self._source.release(worker)
        return self.give_back(worker) if self._rounds else self._held.doubt(worker)

    def doubtful(self, worker: str) -> tuple[int, ...]:
        """Return the numbers of a lost worker's tasks that the shards may have applied."""
        return tuple(task.task for task in self._held.doubtful(worker))

    def resolve(self, worker: str, applied: Sequence[Container[int]]) -> int:
        """Finish the doubtful tasks that all shards have applied and requeue the others; return the number finished.

        ``applied`` has the tasks that each shard has applied. Does nothing for tasks that :meth:`rewind` has requeued.
        """
        tasks = self._held.resolve(worker)
        by = {task.task: sum(task.task in shard for shard in applied) for task in tasks}
        lacking = [task for task in tasks if by[task.task] < max(1, len(applied))]
        self._partly.update(task.task for task in lacking if by[task.task])
        self._ready.extendleft(reversed(self._source.returned(lacking)))
        for task in tasks:
            if task not in lacking:
                self._count(task)
        return len(tasks) - len(lacking)

    def stop(self) -> None:
        """Drop unleased tasks; a round, and a task that some shards have applied, is still completed."""
        self._source.drop()
        self._redo.clear()
        if not (self._rounds and self._round_begun):
            self._ready = deque(task for task in self._ready if self._is_begun(task))

    def _is_begun(self, task: Task) -> bool:
        return task.task in self._partly or self._settlement.is_partly_contained(task)

    # ---- snapshots of the shards

    def quiesce(self) -> None:
        """Record that a snapshot begins; lease no new round until :meth:`go_on`."""
        self._quiesced = True
        if self.is_quiet:
            self._settlement.mark()

    @property
    def is_quiet(self) -> bool:
        """Whether no round is open: the shards hold whole rounds. Always true without rounds."""
        return not (self._rounds and self._round_begun)

    def go_on(self) -> None:
        """Lease rounds again."""
        self._quiesced = False

    def settle(self, contained: Sequence[Container[int]] | None = None) -> None:
        """Settle the tasks whose updates are in a snapshot that is stored.

        Args:
            contained: For each shard, the tasks that its part of the snapshot contains; of rounds, those finished
                before :meth:`quiesce` are contained. None: everything that is finished is contained; of rounds, only
                if :attr:`is_quiet`.
        """
        if contained is None and self.is_quiet:
            self._settlement.settle_all()
        elif self._rounds or contained is None:
            self._settlement.settle_marked()
        else:
            self._settlement.settle(contained)

    def rewind(self) -> int:
        """Requeue every task that the snapshot lacks, in the order of the tasks; return the samples counted back.

        Unreported tasks are finished if the snapshot contains them. The others come before those of the
        source. Rounds are whole again, with the same numbers and parts. This is true
        after :meth:`stop` too: what was leased or finished is computed again, and nothing else. Batches that only their
        worker can make are lost; see :meth:`~nfdt.schedulers.pulled.PulledTasks.returned`.
        """
        done, unreported = self._settlement.clear(), self._held.clear()
        held = [task for task in unreported if not self._settlement.is_contained(task)]
        open_rounds = {task.round for task in [*held, *self._ready]}
        finished = {task.round for task in done} - open_rounds if self._rounds else done
        self._finished -= len(finished)
        samples = sum(task.samples for task in done)
        self.samples_finished -= samples
        self._finished_bytes -= sum(len(task.data) for task in done)
        again = [*self._source.returned([*done, *held]), *self._ready, *chain(*self._redo)]
        # Rounds come in order, whole; tasks without rounds in the order of their numbers.
        again.sort(key=lambda task: (task.round, task.part if task.round else task.task))
        self._ready.clear()
        self._redo.clear()
        self._round_begun = False
        if self._rounds:
            self._redo.extend(list(tasks) for _, tasks in groupby(again, lambda task: task.round))
        else:
            self._ready.extend(again)
        for task in unreported:
            if self._settlement.is_contained(task):
                self._count(task)
        return samples

    def skip(self, progress: EpochProgress, row_samples: int = 1) -> None:
        """Begin with these rows and rounds settled; does nothing if tasks have no row numbers.

        Tasks that some shards have applied are leased as they were; ``row_samples`` is the number of samples of a row.
        """
        if self._source.rows is None:
            return
        for number, pass_index, start, stop in progress.partly:
            self._ready.append(Task(number, start, stop, pass_index, samples=(stop - start) * row_samples))
            self._partly.add(number)
        self._finished = self._source.skip([*progress.rows, *(task[1:] for task in progress.partly)])
        self._finished -= len(progress.partly)
        self.samples_finished = progress.samples
        self._settlement.begin(progress)

    def progress(self, epoch: int) -> EpochProgress | None:
        """Return what the last snapshot contains; None if tasks have no row numbers, or are not kept."""
        if self._source.rows is None or not self._keeps:
            return None
        pass_index, rows = self._source.rows
        begun = filter(self._is_begun, chain(self._held, self._ready))
        return self._settlement.progress(epoch, (pass_index, rows.start), self.samples_finished, self._held, begun)

    # ---- state

    def available(self, worker: str) -> bool:
        """Whether :meth:`issue` would lease a task to the worker now."""
        return self._leases and self._has(worker)

    @property
    def decided(self) -> bool:
        """Whether the existence of another task is known: one is available, or none will come."""
        return self.done or self._has("")

    def exhausted(self, worker: str) -> bool:
        """Whether no task is left for the worker, unless another worker is lost."""
        return not self._ready and not self._redo and self._source.exhausted(worker)

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
        return self._source.remaining + len(self._ready) + len(self._redo)

    @property
    def done(self) -> bool:
        """Whether every task is finished and none will come."""
        return self._source.finished and not self._redo and not self._in_flight

    @property
    def _in_flight(self) -> bool:
        return bool(self._ready or self._held)

    @property
    def _leases(self) -> bool:
        return self._round_begun or not (self._rounds and self._quiesced)

    def _has(self, worker: str) -> bool:
        self._open_round()
        return bool(self._ready) or (not self._rounds and self._source.available(worker))

    def _open_round(self) -> None:
        if self._rounds and not self._in_flight:
            self._ready.extend(self._redo.popleft() if self._redo else self._next_round())

    def _next_round(self) -> list[Task]:
        """Take a round from the source; its tasks state the samples of the whole, if they are known beforehand."""
        tasks = self._source.take_round()
        total = 0 if self._counted else sum(task.samples for task in tasks)
        return [replace(task, round_samples=total) for task in tasks]

    def _pick(self, part: int | None) -> Task:
        for index, task in enumerate(self._ready):
            if self._rounds and task.part == part:
                del self._ready[index]
                return task
        return self._ready.popleft()
