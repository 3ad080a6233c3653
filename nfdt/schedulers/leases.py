"""Leases of tasks: every task is computed exactly once, or again if its worker or its update is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain, groupby

from nfdt.core.specs.job import EpochProgress
from nfdt.schedulers.row_set import RowSet
from nfdt.schedulers.sources import TaskSource
from nfdt.schedulers.tasks import Task
from nfdt.schedulers.unsettled import UnsettledTasks


class LeaseBook:
    """The state of one epoch's tasks: unleased, leased, finished, settled.

    A task is leased to one worker at a time; only that worker can finish it. :meth:`lose` requeues a lost
    worker's tasks before all others, :meth:`give_back` those that it has not begun.

    A finished task is settled once a snapshot of the shards contains its update. :meth:`rewind` requeues all tasks that
    are not settled, because the shards have gone back to their last snapshot.

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
        self._held: dict[str, dict[int, Task]] = {}
        self._round_begun = False
        self._quiesced = False
        self._unsettled = UnsettledTasks()
        self._settled = RowSet()
        self._settled_round = 0
        self.settled_bytes = 0  # of streamed batches, which are no longer kept

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
    def unsettled_bytes(self) -> int:
        """Size of the streamed batches that are finished and not settled."""
        return self._unsettled.data_bytes

    @property
    def leased(self) -> int:
        """Number of tasks that are held."""
        return sum(map(len, self._held.values()))

    def finish(self, worker: str, task: int, samples: int | None = None, sequence: int = 0) -> Task | None:
        """Finish and return a task that the worker holds; None if the worker does not hold it (any more).

        ``samples`` is the number that the worker has counted, ``sequence`` the number of its push; without a push (0)
        the task is settled at once, unless it is a part of a round.
        """
        done = self._held.get(worker, {}).pop(task, None)
        if done is None:
            return None
        if self._counted and samples is not None:
            done = replace(done, samples=samples)
        self.samples_finished += done.samples
        push = 1 if self._rounds else sequence  # rounds are settled as a whole
        if not (self._keeps and self._unsettled.add(done, worker, push)):
            self._settle(done)
        if not self._rounds or not self._in_flight:
            self._finished += 1
            self._round_begun = False
            if self._rounds and self._quiesced:
                self._unsettled.mark()
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
        self._redo.clear()
        if not (self._rounds and self._round_begun):
            self._ready.clear()

    # ---- snapshots of the shards

    def quiesce(self) -> None:
        """Record that a snapshot begins; lease no new round until :meth:`go_on`."""
        self._quiesced = True
        if self.is_quiet:
            self._unsettled.mark()

    @property
    def is_quiet(self) -> bool:
        """Whether no round is open: the shards hold whole rounds. Always true without rounds."""
        return not (self._rounds and self._round_begun)

    def go_on(self) -> None:
        """Lease rounds again."""
        self._quiesced = False

    def settle(self, contained: Mapping[str, int] | None = None) -> None:
        """Settle the tasks whose updates are in a snapshot that is stored.

        Args:
            contained: Sequence number of each worker's last push in the snapshot. Of a worker without a number, the
                tasks finished before :meth:`quiesce` are contained. The same is true of all rounds, whatever the
                numbers. None: everything that is finished is contained; of rounds, only if :attr:`is_quiet`.
        """
        if self._rounds and not (contained is None and self.is_quiet):
            contained = {}
        for task in self._unsettled.settle(contained):
            self._settle(task)

    def rewind(self) -> int:
        """Requeue every task that is held or not settled, in the order of the tasks; return the samples counted back.

        They come before the tasks of the source. Rounds are whole again, with the same numbers and parts. This is true
        after :meth:`stop` too: what was leased or finished is computed again, and nothing else. Batches that only their
        worker can make are lost; see :meth:`~nfdt.schedulers.pulled.PulledTasks.returned`.
        """
        done = self._unsettled.clear()
        held = [task for tasks in self._held.values() for task in tasks.values()]
        open_rounds = {task.round for task in [*held, *self._ready]}
        finished = {task.round for task in done} - open_rounds if self._rounds else done
        self._finished -= len(finished)
        samples = sum(task.samples for task in done)
        self.samples_finished -= samples
        again = [*self._source.returned([*done, *held]), *self._ready, *chain(*self._redo)]
        again.sort(key=lambda task: (task.round, task.part if task.round else task.task))
        self._held.clear()
        self._ready.clear()
        self._redo.clear()
        self._round_begun = False
        if self._rounds:
            self._redo.extend(list(tasks) for _, tasks in groupby(again, lambda task: task.round))
        else:
            self._ready.extend(again)
        return samples

    def skip(self, progress: EpochProgress) -> None:
        """Begin with these rows and rounds settled. Does nothing if tasks have no row numbers."""
        if self._source.rows is None:
            return
        self._finished = self._source.skip(progress.rows)
        self.samples_finished = progress.samples
        self._settled = RowSet(progress.rows)
        self._settled_round = progress.round

    def progress(self, epoch: int) -> EpochProgress | None:
        """Return what is settled; None if tasks have no row numbers, or are not kept.

        The first range begins with the first row of the epoch; it is empty if that row is not settled.
        """
        if self._source.rows is None or not self._keeps:
            return None
        pass_index, rows = self._source.rows
        first, ranges = (pass_index, rows.start), self._settled.ranges
        if not ranges or ranges[0][:2] != first:
            ranges = ((*first, rows.start), *ranges)
        samples = self.samples_finished - self._unsettled.samples
        return EpochProgress(epoch=epoch, samples=samples, round=self._settled_round, rows=ranges)

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
        return bool(self._ready) or any(self._held.values())

    @property
    def _leases(self) -> bool:
        return self._round_begun or not (self._rounds and self._quiesced)

    def _has(self, worker: str) -> bool:
        self._open_round()
        return bool(self._ready) or (not self._rounds and self._source.available(worker))

    def _open_round(self) -> None:
        if self._rounds and not self._in_flight:
            self._ready.extend(self._redo.popleft() if self._redo else self._source.take_round())

    def _pick(self, part: int | None) -> Task:
        for index, task in enumerate(self._ready):
            if self._rounds and task.part == part:
                del self._ready[index]
                return task
        return self._ready.popleft()

    def _settle(self, task: Task) -> None:
        self.settled_bytes += len(task.data)
        if self._keeps and self._source.rows is not None:
            self._settled.add(task.pass_index, task.start, task.stop)
            self._settled_round = max(self._settled_round, task.round)
