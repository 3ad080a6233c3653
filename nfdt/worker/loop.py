"""The loop of a worker: it requests tasks, computes gradients, pushes, pulls and reports.

It has no thread, socket or clock of its own: :meth:`WorkerLoop.run` is a generator that yields what it wants, and is
sent the answer, as the protocols of h11 and httpx's ``auth_flow`` are. The thread of a real worker
(:mod:`nfdt.worker.worker`) and the virtual clock (:mod:`nfdt.simulate.worker`) drive it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from nfdt.core.arrays.table_rows import RowVector
from nfdt.core.specs.job import JobSpec
from nfdt.core.training.metric_states import numbers
from nfdt.core.work import instructions as ins
from nfdt.core.work.spans import COMPUTE, END_OF_EPOCH, EVALUATE, EXCHANGE, LEASE, LEASES
from nfdt.core.work.statistics import WorkerStatistics
from nfdt.core.work.tasks import Task
from nfdt.transport.base import ParameterClient
from nfdt.worker import wants
from nfdt.worker.pipeline import Pipeline, ShardsMoved
from nfdt.worker.task_times import FinishedTask, TaskTimes, report_finished


class WorkerLoop:
    """Loop of one worker in one job, until the instruction to leave.

    Args:
        spec: The job.
        client: Client of the shards. The loop begins pushes; all else that waits is wanted of the driver.
        clock: Returns seconds.
        span: Takes kind, begin, end, number and track of what the worker did; see
            :meth:`~nfdt.core.work.spans.SpanRing.add`.
        rate: Returns the factor of the learning rate of a vector by its samples and denominator; default: the job's.
        stopped: Whether the job is over for this worker, also in the middle of an instruction.
        ending: Whether this worker shall leave the job after the step that it has begun.
        moved: Whether the shards have been restored elsewhere.

    Attributes:
        pipeline: Weights and pushes in flight.
        statistics: Totals; the driver counts ``wait_s`` and ``first_loss``.
        epoch_steps: Number of steps since the worker was given an untrained state.
    """

    def __init__(
        self,
        spec: JobSpec,
        client: ParameterClient,
        clock: Callable[[], float],
        *,
        span: Callable[..., object] = lambda *_: None,
        rate: Callable[[int, float], float] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        ending: Callable[[], bool] = lambda: False,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec, self._clock, self._span, self._rate = spec, clock, span, rate or spec.rate_of
        self._stopped, self._ending, self._moved = stopped, ending, moved
        self.pipeline: Pipeline[list[FinishedTask]] = Pipeline(client)
        self.statistics, self._times = WorkerStatistics(), TaskTimes(clock)
        self._finished: list[FinishedTask] = []  # not reported yet
        self._unpushed: list[tuple[Task, int]] = []  # of the steps whose result has not been sent, with their samples
        self._asked_ahead = False
        self._validated: int | None = None  # the epoch whose final weights the pipeline holds, exactly
        self._epoch = self.epoch_steps = 0
        self._logs: dict[str, float] = {}

    def run(self) -> Generator[wants.Want, Any, str]:
        """Yield what the loop wants, and take the answers; return the reason for which it ends.

        A driver throws :class:`ShardsMoved` in place of an answer where the shards are restored meanwhile.
        """
        report = ins.Report()
        while not self._stopped():
            instruction = yield from self._next(report)
            answered = self._clock()
            if isinstance(instruction, ins.Leave):
                return instruction.reason
            if self._ending() and not isinstance(instruction, ins.CollectState | ins.MoveShards):
                if not self.pipeline.in_flight:
                    return "its process shall end"
                instruction = ins.Wait()  # take the replies to its pushes and report them
            report = ins.Report()
            with contextlib.suppress(ShardsMoved):
                report = yield from self._execute(instruction)
            if (kind := _SPAN_OF.get(type(instruction))) is not None:
                self._span(kind, answered, self._clock(), _number_of(instruction), LEASES)
            if self._moved():
                report = yield from self._move()
        return "the job is over"

    def _next(self, report: ins.Report) -> Generator[wants.Want, Any, ins.Instruction]:
        instruction: ins.Instruction | None = None
        if self._asked_ahead:
            self._asked_ahead = False
            instruction = yield wants.TakeAhead()
        if instruction is None or self._ending() or self._moved():
            instruction = yield wants.Ask(self._filled(report))
        return instruction

    def _filled(self, report: ins.Report, *begun: int) -> ins.Report:
        """Add the finished tasks to a report; ``begun`` are tasks without a push yet."""
        in_flight = frozenset((*(done.task for sent in self.pipeline.in_flight for done in sent), *begun))
        done, self._finished = report_finished(self._finished, self._times), []
        return replace(report, **done, epoch=self._epoch, logs=self._logs, in_flight=in_flight)

    def _execute(self, instruction: ins.Instruction) -> Generator[wants.Want, Any, ins.Report]:
        if isinstance(instruction, ins.Work):
            yield from self._on_work(instruction)
            return ins.Report()
        if isinstance(instruction, ins.MoveShards):
            return (yield wants.Execute(instruction))
        yield from self._settle(0)
        match instruction:
            case ins.Wait():
                return ins.Report()
            case ins.BeginEpoch():
                self._epoch, self.epoch_steps, self._logs = instruction.epoch, 0, {}
                self.pipeline.forget()
            case ins.CollectState():
                self.pipeline.forget()  # the weights may be replaced before training continues
            case ins.Evaluate():
                if self._validated != instruction.epoch:
                    self.pipeline.forget()
                    self._validated = instruction.epoch
                if not self.pipeline.holds_weights:
                    yield wants.Pull(exact=True)
        return (yield wants.Execute(instruction))

    def _move(self) -> Generator[wants.Want, Any, ins.Report]:
        """Drop everything done with the shards before; return an empty report."""
        self.pipeline.drop()
        self._times = TaskTimes(self._clock)
        self._finished, self._unpushed, self._asked_ahead, self._validated = [], [], False, None
        yield wants.Move()
        return ins.Report()

    def _on_work(self, work: ins.Work) -> Generator[wants.Want, Any, None]:
        logs: Mapping[str, Any] = {}
        overlap = min(work.overlap, self._spec.algorithm.overlap)
        if work.untrained:
            yield wants.Execute(work)
            self.epoch_steps = 0
        if work.pull:
            yield from self._settle(0)
            self.pipeline.forget()
        self._times.begin(self.statistics.compute_s)
        yield wants.Prepare(work.tasks)
        for task, following in zip(work.tasks, (*work.tasks[1:], None), strict=True):
            if self._stopped() or self._moved():
                return  # nothing of this work counts
            if self._ending() or self._times.over(work.budget_s):
                break
            if following is None and work.look_ahead:
                self._asked_ahead = True
                yield wants.AskAhead(self._filled(ins.Report(), task.task))
            step = yield from self._train_on(task, want_weights=not work.no_weights)
            yield wants.Overlap(step, following)
            yield from self._settle(overlap)
            self._times.spent(task.task, self.statistics.compute_s)
            logs = step.logs
        if self._unpushed:  # what is reported as finished must be on the shards
            last, _ = self._unpushed[-1]
            self._send((yield wants.Difference(self.pipeline.weights())))
            yield from self._settle(0)
            self._times.spent(last.task, self.statistics.compute_s)
        self._logs = numbers(logs)

    def _train_on(self, task: Task, *, want_weights: bool) -> Generator[wants.Want, Any, wants.Step]:
        """Compute a gradient and send it."""
        statistics, clock, span = self.statistics, self._clock, self._span
        began = clock()
        if not self.pipeline.holds_weights:
            yield wants.Pull()
        held = self.pipeline.weights()
        pulled = clock()
        step: wants.Step = yield wants.Compute(task, held)
        computed = clock()
        self._unpushed.append((task, step.samples))
        if step.gradient is not None:
            self._send(step.gradient, step.denominator, step.seconds, want_weights=want_weights)
        elif step.due:
            self._send((yield wants.Difference(held)))
        sent = clock()
        statistics.compute_s += step.seconds
        statistics.exchange_s += sent - computed + pulled - began
        span(EXCHANGE, began, pulled, task.task)
        span(COMPUTE, pulled, computed, task.task)
        span(EXCHANGE, computed, sent, task.task)
        statistics.samples += step.samples
        statistics.steps += 1
        self.epoch_steps += 1
        return step

    def _send(
        self, vector: Any, denominator: float = 0.0, compute_s: float = 0.0, *, want_weights: bool = True
    ) -> None:
        """Push a vector of the tasks that have not been pushed; all of them are finished with the reply."""
        pushed, self._unpushed = self._unpushed, []
        task, samples = pushed[-1][0], sum([samples for _, samples in pushed])
        # A vector that is not finite is pushed as well: all shards drop it and close its round.
        if self._spec.cluster.shards > 1:
            vector = _all_or_nothing(vector)
        self.pipeline.send(
            [FinishedTask(each.task, samples) for each, samples in pushed],
            vector,
            samples=samples,
            round=task.round,
            part=task.part,
            parts=max(task.parts, 1),
            tasks=[each.task for each, _ in pushed],
            tickets=b"".join([each.ticket for each, _ in pushed]),
            rate=self._rate(samples, denominator),
            denominator=denominator,
            want_weights=want_weights and task.parts <= 1,
            compute_s=compute_s,
        )
        self.statistics.batch_sizes[samples] += 1

    def _settle(self, unanswered: int) -> Generator[wants.Want, Any, None]:
        """Take replies of the shards; no computation hides the time spent here."""
        began = self._clock()
        for sent, pushed in (yield wants.Settle(unanswered)):
            self.statistics.staleness[pushed.staleness] += 1
            self.statistics.dropped += not pushed.applied
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
    return vector if np.isfinite(vector).all() else np.full_like(vector, np.nan)


def drive(loop: Generator[wants.Want, Any, str], acts: wants.Acts) -> str:
    """Run a loop whose driver waits in this thread; return the reason for which it ends."""
    resume: Callable[[Any], wants.Want] = loop.send
    answer: Any = None
    while True:
        try:
            wanted = resume(answer)
        except StopIteration as end:
            return str(end.value)
        try:
            resume, answer = loop.send, acts[type(wanted)](wanted)
        except ShardsMoved as moved:
            resume, answer = loop.throw, moved
