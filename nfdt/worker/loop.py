"""The loop of a worker: it requests tasks, computes gradients, pushes, pulls and reports.

It has no thread, socket or clock of its own: :meth:`WorkerLoop.run` is a generator that yields what it wants, and is
sent the answer, as the protocols of h11 and httpx's ``auth_flow`` are. The thread of a real worker
(:mod:`nfdt.worker.worker`) and the virtual clock (:mod:`nfdt.simulate.worker`) drive it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np

from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import RowVector
from nfdt.core.work import instructions as ins
from nfdt.core.work.spans import COMPUTE, END_OF_EPOCH, EVALUATE, EXCHANGE, LEASE, LEASES
from nfdt.core.work.statistics import WorkerStatistics
from nfdt.core.work.tasks import Task
from nfdt.model.training.metric_states import merge_metric_states, numbers
from nfdt.worker.driver import LoopDriver, Step, Want
from nfdt.worker.pipeline import ShardsMoved
from nfdt.worker.task_times import TaskTimes

METRICS_SHARE = 0.002  # of a worker's time, at most, in which it takes states of its metrics to report them


@dataclass(frozen=True)
class EarlyPart:
    """Part of a task of the next epoch, from its first row on, that a worker has computed before this epoch ends."""

    task: int
    start: int
    rows: int = 0
    samples: int = 0
    batches: int = 0
    seconds: float = 0.0

    def begins(self, task: Task) -> bool:
        """Whether this is the beginning of a task, of which more is left."""
        return (self.task, self.start) == (task.task, task.start) and task.start + self.rows < task.stop

    def with_step(self, rows: int, step: Step) -> EarlyPart:
        """Return this part and the rows of one more step."""
        rows, samples, batches = self.rows + rows, self.samples + step.samples, self.batches + step.batches
        return EarlyPart(self.task, self.start, rows, samples, batches, self.seconds + step.seconds)


class WorkerLoop:
    """Loop of one worker in one job, until the instruction to leave.

    Args:
        driver: The driver. The loop begins pushes on its pipeline; all else that waits is wanted.
        clock: Returns seconds.
        span: Takes kind, begin, end, number and track of what the worker did; see
            :meth:`~nfdt.core.work.spans.SpanRing.add`.

    Attributes:
        statistics: Totals; the driver counts ``wait_s`` and ``first_loss``.
        epoch_steps: Number of steps since the worker was given an untrained state.
    """

    def __init__(
        self,
        driver: LoopDriver,
        clock: Callable[[], float],
        span: Callable[..., object] = lambda *_: None,
    ) -> None:
        self._spec, self._driver, self._clock, self._span = driver.spec, driver, clock, span
        self._pipeline = driver.pipeline
        self.statistics, self._times = WorkerStatistics(), TaskTimes(clock)
        self._finished: list[tuple[Task, int]] = []  # not reported yet
        self._unpushed: list[tuple[Task, int]] = []  # of the steps whose result has not been sent
        self._unpushed_s = 0.0  # of computation, in these steps
        self._early: EarlyPart | None = None
        self._apart: dict[int, bytes] = {}  # metrics of tasks that are not reported yet, and count apart
        self._metrics_after = -np.inf  # time from which another state of the metrics may be taken
        algorithm, consistency = driver.spec.algorithm, driver.spec.algorithm.consistency_facts
        self._has_own_steps = algorithm.exchange_facts.local
        # Where others take over the tasks of a late worker, its metrics must be known until then.
        self._reports_metrics = algorithm.topology_facts.flat and not (consistency.synchronous or consistency.bounded)
        self._asked_ahead = False
        self._validated: int | None = None  # the epoch whose final weights the pipeline holds, exactly
        self._epoch = self.epoch_steps = 0
        self._logs: dict[str, float] = {}

    def run(self) -> Generator[Want, Any, str]:
        """Yield what the loop wants, and take the answers; return the reason for which it ends.

        A driver throws :class:`ShardsMoved` in place of an answer where the shards are restored meanwhile.
        """
        report = ins.Report()
        while not self._driver.stopped():
            instruction = yield from self._next(report)
            answered = self._clock()
            if isinstance(instruction, ins.Leave):
                return instruction.reason
            if self._driver.ending() and not isinstance(instruction, ins.CollectState | ins.MoveShards):
                if not self._pipeline.in_flight:
                    return "its process shall end"
                instruction = ins.Wait()  # take the replies to its pushes and report them
            report = ins.Report()
            with contextlib.suppress(ShardsMoved):
                report = yield from self._execute(instruction)
            if (kind := _SPAN_OF.get(type(instruction))) is not None:
                self._span(kind, answered, self._clock(), _number_of(instruction), LEASES)
            if self._driver.moved():
                report = yield from self._move()
        return "the job is over"

    def _next(self, report: ins.Report) -> Generator[Want, Any, ins.Instruction]:
        instruction: ins.Instruction | None = None
        if self._asked_ahead:
            self._asked_ahead = False
            instruction = yield (self._driver.await_ahead,)
        if instruction is None or self._driver.ending() or self._driver.moved():
            instruction = yield self._driver.ask, self._filled(report)
        return instruction

    def _filled(self, report: ins.Report, *begun: int) -> ins.Report:
        """Add the finished tasks to a report; ``begun`` are tasks without a push yet."""
        in_flight = frozenset((*(task.task for sent in self._pipeline.in_flight for task, _ in sent), *begun))
        samples, self._finished = {task.task: samples for task, samples in self._finished}, []
        report = replace(report, finished=tuple(samples), samples=samples, times=self._times.taken(samples))
        if samples:
            report = self._counted(report)
        early = 0 if self._early is None else self._early.rows
        return replace(report, epoch=self._epoch, logs=self._logs, in_flight=in_flight, early=early)

    def _counted(self, report: ins.Report) -> ins.Report:
        """Add the metrics of finished tasks to a report."""
        apart = {task: self._apart.pop(task) for task in report.finished if task in self._apart}
        began = self._clock()
        if not self._reports_metrics or began < self._metrics_after:
            return replace(report, apart=apart)
        metrics, ended = self._driver.metrics(), self._clock()
        self._metrics_after = ended + (ended - began) / METRICS_SHARE
        computed = chain(self._unpushed, *self._pipeline.in_flight)
        counted = frozenset(task.task for task, _ in computed if task.task not in self._apart)
        return replace(report, apart=apart, metrics=metrics, counted=counted)

    def _execute(self, instruction: ins.Instruction) -> Generator[Want, Any, ins.Report]:
        if isinstance(instruction, ins.Work):
            yield from self._on_work(instruction)
            return ins.Report()
        if isinstance(instruction, ins.MoveShards):
            return (yield self._driver.execute, instruction)
        if isinstance(instruction, ins.Evaluate):  # on other weights
            yield from self._forget_early()
        yield from self._await_replies(0)
        match instruction:
            case ins.Wait():
                return ins.Report()
            case ins.BeginEpoch():
                self._epoch, self.epoch_steps, self._logs = instruction.epoch, 0, {}
                if not instruction.ahead:
                    self._pipeline.discard_weights()
            case ins.CollectState(over=False):
                self._pipeline.discard_weights()  # the weights may be replaced before training continues
            case ins.Evaluate(ahead=True):
                yield (self._driver.pull_kept,)
                evaluated = yield self._driver.execute, instruction
                self._pipeline.discard_weights()
                return evaluated
            case ins.Evaluate():
                if self._validated != instruction.epoch:
                    self._pipeline.discard_weights()
                    self._validated = instruction.epoch
                if not self._pipeline.holds_weights:
                    yield (self._driver.pull_exactly,)
        return (yield self._driver.execute, instruction)

    def _move(self) -> Generator[Want, Any, ins.Report]:
        """Drop everything done with the shards before; return an empty report."""
        self._pipeline.drop()
        self._times = TaskTimes(self._clock)
        self._finished, self._unpushed, self._unpushed_s, self._apart, self._early = [], [], 0.0, {}, None
        self._asked_ahead, self._validated = False, None
        yield (self._driver.move,)
        return ins.Report()

    def _on_work(self, work: ins.Work) -> Generator[Want, Any, None]:
        logs: Mapping[str, Any] = {}
        early, tasks = work.epoch != self._epoch and self._has_own_steps, work.tasks
        overlap = min(work.overlap, self._spec.algorithm.overlap)
        if work.untrained:
            yield self._driver.execute, work
            self.epoch_steps = 0
        if work.pull:
            yield from self._await_replies(0)
            self._pipeline.discard_weights()
        self._times.begin(self.statistics.compute_s)
        if self._early is not None and not any(map(self._early.begins, tasks)):
            yield from self._forget_early()
        yield self._driver.prepare, tuple(map(self._rest_of, tasks))
        for task, following in zip(tasks, (*tasks[1:], None), strict=True):
            if self._driver.stopped() or self._driver.moved():
                return  # nothing of this work counts
            if self._driver.ending() or self._times.over(work.budget_s):
                break
            if following is None and work.look_ahead:
                self._asked_ahead = True
                yield self._driver.ask_ahead, self._filled(ins.Report(), task.task)
            apart = work.apart or early or self._rest_of(task) != task
            if apart:
                self._driver.begin_apart()
            step = yield from self._train_on(task, want_weights=not work.no_weights, early=early)
            yield self._driver.overlap, step, following
            if apart:
                before = self._apart.get(task.task, b"")
                self._apart[task.task] = merge_metric_states([before, self._driver.end_apart()])
            if early:  # the epoch waits for the reply, which is not needed here yet
                self._pipeline.take_arrived()
            yield from self._await_replies(overlap)
            self._times.spent(task.task, self.statistics.compute_s)
            logs = step.logs
        if early:
            return
        if self._unpushed:  # what is reported as finished must be on the shards
            last, _ = self._unpushed[-1]
            yield from self._await_replies(0)
            yield from self._push_difference()
            yield from self._await_replies(0)
            self._times.spent(last.task, self.statistics.compute_s)
        self._logs = numbers(logs)

    def _rest_of(self, task: Task) -> Task:
        """Return the part of a task that was not computed early."""
        early = self._early
        return task if early is None or not early.begins(task) else replace(task, start=task.start + early.rows)

    def _forget_early(self) -> Generator[Want, Any, None]:
        """Forget what was computed early: its task is computed again, here or elsewhere."""
        early, self._early = self._early, None
        if early is not None:
            yield from self._await_replies(0)
            self._times.taken([early.task])
            self._apart.pop(early.task, None)
            yield (self._driver.forget,)

    def _train_on(self, task: Task, *, want_weights: bool, early: bool) -> Generator[Want, Any, Step]:
        """Compute a gradient and send it, or make steps; those of a part that is ``early`` are pushed with the rest."""
        statistics, clock, span = self.statistics, self._clock, self._span
        began = clock()
        if not self._pipeline.holds_weights:
            yield (self._driver.pull,)
        held = self._pipeline.weights()
        pulled = clock()
        part = self._rest_of(task)
        step: Step = yield self._driver.compute, part, held
        computed, waited = clock(), 0.0
        before = self._early if self._early is not None and self._early.begins(task) else None
        done = (before or EarlyPart(task.task, task.start)).with_step(part.stop - part.start, step)
        if early:
            self._early = done
        else:
            self._early = None if before is not None else self._early
            self._unpushed.append((task, done.samples))
            self._unpushed_s += done.seconds
            self.epoch_steps += done.batches
        if step.gradient is not None:
            self._send(step.gradient, step.denominator, want_weights=want_weights)
            step.gradient = None  # the next one is computed without it in memory
        elif step.due and not early:
            yield from self._await_replies(0)
            waited = clock() - computed  # counted there
            yield from self._push_difference()
        sent = clock()
        statistics.compute_s += step.seconds
        statistics.exchange_s += sent - computed - waited + pulled - began
        span(EXCHANGE, began, pulled, task.task)
        span(COMPUTE, computed - step.seconds, computed, task.task)  # as compute_s counts it
        span(EXCHANGE, computed, sent, task.task)
        statistics.samples += step.samples
        statistics.steps += step.batches
        return step

    def _push_difference(self) -> Generator[Want, Any, None]:
        """Push what the worker's own steps have changed since weights that have its earlier pushes: no reply is due."""
        self._send((yield self._driver.difference, self._pipeline.weights().weights))

    def _send(self, vector: Any, denominator: float = 0.0, *, want_weights: bool = True) -> None:
        """Push a vector of the tasks that have not been pushed; all of them are finished with the reply."""
        pushed, self._unpushed = self._unpushed, []
        compute_s, self._unpushed_s = self._unpushed_s, 0.0
        task, samples = pushed[-1][0], sum([samples for _, samples in pushed])
        # A vector that is not finite is pushed as well: all shards drop it and close its round.
        if self._spec.cluster.shards > 1:
            vector = _all_or_nothing(vector)
        self._pipeline.send(
            pushed,
            vector,
            samples=samples,
            round=task.round,
            part=task.part,
            parts=max(task.parts, 1),
            tasks=[each.task for each, _ in pushed],
            tickets=b"".join([each.ticket for each, _ in pushed]),
            rate=self._driver.rate(samples, denominator),
            denominator=denominator,
            want_weights=want_weights and task.parts <= 1,
            compute_s=compute_s,
        )
        self.statistics.batch_sizes[samples] += 1

    def _await_replies(self, unanswered: int) -> Generator[Want, Any, None]:
        """Take replies of the shards; no computation hides the time spent here."""
        began = self._clock()
        for sent, pushed in (yield self._driver.await_replies, unanswered):
            self.statistics.staleness[pushed.staleness] += 1
            self.statistics.dropped += not pushed.applied
            self.statistics.push_s += pushed.seconds
            self._times.pushed(sent[-1][0].task, pushed.seconds)
            self._finished += sent
        ended = self._clock()
        self.statistics.exchange_s += ended - began
        self._span(EXCHANGE, began, ended)


_SPAN_OF: Mapping[type, int] = MappingProxyType(
    {ins.Work: LEASE, ins.Evaluate: EVALUATE, ins.CollectState: END_OF_EPOCH, ins.BeginEpoch: END_OF_EPOCH}
)


def _number_of(instruction: ins.Instruction) -> int:
    """Return the number that the trace shows with an instruction: the tasks of a lease, or an epoch."""
    return len(instruction.tasks) if isinstance(instruction, ins.Work) else getattr(instruction, "epoch", 0)


def _all_or_nothing(vector: Any) -> Any:
    """Return the vector, or one that every shard drops if a part of it is not finite."""
    if isinstance(vector, RowVector):
        return vector if vector.finite else vector.filled_with_nan()
    if isinstance(vector, Pieces):
        finite = all(np.isfinite(part).all() for part in vector.arrays)
        return vector if finite else np.full(vector.entry.shape, np.nan, np.float32)
    return vector if np.isfinite(vector).all() else np.full_like(vector, np.nan)


def drive(loop: Generator[Want, Any, str]) -> str:
    """Run a loop whose driver waits in this thread; return the reason for which it ends."""
    resume: Callable[[Any], Want] = loop.send
    answer: Any = None
    while True:
        try:
            wanted, *arguments = resume(answer)
        except StopIteration as end:
            return str(end.value)
        try:
            resume, answer = loop.send, wanted(*arguments)
        except ShardsMoved as moved:
            resume, answer = loop.throw, moved
