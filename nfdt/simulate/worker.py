"""A simulated worker: :mod:`nfdt.worker.worker` rewritten as an activity that waits on the virtual clock.

A group of workers that step together, or an allreduce ring, is one simulated worker with several machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.statistics import WorkerStatistics
from nfdt.model.backends.step_result import numbers
from nfdt.model.training.job_model import samples_of
from nfdt.model.training.ring_rate import ring_rate
from nfdt.schedulers import Task
from nfdt.schedulers.proportions import proportional_split
from nfdt.simulate.client import VirtualClient
from nfdt.simulate.events import ActivitySteps, Signal
from nfdt.simulate.machines import Machine
from nfdt.simulate.posts import Post
from nfdt.simulate.trainer import StepGradient, Trainer
from nfdt.transport.base import Pulled, Pushed
from nfdt.worker.pipeline import Pipeline
from nfdt.worker.task_times import FinishedTask, TaskTimes, report_finished

AskInstruction = Callable[[str, ins.Report], ins.Instruction | Signal]


class WorkerObserver(Protocol):
    """Observer of a worker's steps and pushes."""

    def applied(self, worker: str, task: int, pushed: Pushed) -> None:
        """Record that the reply to a push has arrived."""
        ...

    def member_stepped(self, machine: int, samples: int, seconds: float) -> None:
        """Record that one machine of a worker has done its part of a step."""
        ...


@dataclass
class SimulatedWorker:
    """Worker of a simulated job; runs until its instruction is Leave, or :attr:`client` is lost.

    Attributes:
        spec: The job.
        name: Name of this worker in the job.
        index: Number that decides its random seeds.
        post: Machines it computes with.
        trainer: The model.
        client: Client of the shards.
        ask: Returns the next instruction, or a signal that fires with it.
        listener: Observer of its steps.
        clock: Returns the virtual time in seconds.
    """

    spec: JobSpec
    name: str
    index: int
    post: Post
    trainer: Trainer
    client: VirtualClient
    ask: AskInstruction
    listener: WorkerObserver
    clock: Callable[[], float]
    statistics: WorkerStatistics = field(default_factory=WorkerStatistics)

    def __post_init__(self) -> None:
        self._pipeline: Pipeline[FinishedTask] = Pipeline(self.client, self.spec.algorithm.overlap)
        self._times = TaskTimes(self.clock)
        self._epoch = self._epoch_steps = 0
        self._logs: dict[str, float] = {}
        self._finished: list[FinishedTask] = []  # not reported yet
        self._ahead: Signal | None = None  # fires with the answer to a request that was made ahead

    def run(self) -> ActivitySteps:
        """Run the worker as an activity."""
        answer: Mapping[str, Any] = {}
        while True:
            if self._ahead is not None:
                ahead, self._ahead = self._ahead, None
                instruction: Any = yield ahead
                if isinstance(instruction, ins.Work):
                    answer = yield from self._on_work(instruction)
                    continue
            yield from self.client.travel()
            instruction = self.ask(self.name, self._report(answer))
            if isinstance(instruction, Signal):
                began = self.clock()
                instruction = yield instruction
                self.statistics.wait_s += self.clock() - began
            yield from self.client.come_back(0)
            if isinstance(instruction, ins.Leave):
                return
            if isinstance(instruction, ins.Work):
                answer = yield from self._on_work(instruction)
            else:
                yield from self._drained()
                answer = self._answer(instruction)

    def _report(self, answer: Mapping[str, Any], *begun: int) -> ins.Report:
        """Return a report of the finished tasks; ``begun`` are tasks without a push yet."""
        done, self._finished = self._finished, []
        return ins.Report(
            **report_finished(done, self._times),
            epoch=self._epoch,
            logs=self._logs,
            in_flight=frozenset((*(sent.task for sent in self._pipeline.in_flight), *begun)),
            **answer,
        )

    def _look_ahead(self, task: int) -> Signal:
        """Request the next lease while a task is computed; return a signal that fires with the answer."""
        report, answered = self._report({}, task), self.client.signal()

        def request() -> ActivitySteps:
            yield from self.client.travel()
            instruction = self.ask(self.name, report)
            yield from self.client.come_back(0)
            answered.fire(instruction)

        self.client.start(request())
        return answered

    def _answer(self, instruction: ins.Instruction) -> Mapping[str, Any]:
        """Execute an instruction other than Work; return the fields of the report that answer it."""
        match instruction:
            case ins.BeginEpoch(epoch, untrained):
                self._epoch, self._epoch_steps, self._logs = epoch, 0, {}
                self._pipeline.forget()
                self.trainer.begin_epoch(self.index, epoch, untrained)
            case ins.CollectState(epoch):
                untrained, metrics = self.trainer.collect(self.index)
                return {"epoch_state": ins.EpochState(epoch, untrained, metrics, self._epoch_steps)}
            case ins.Evaluate(epoch, tasks, untrained):
                self._pipeline.forget()
                weights = self._pipeline.weights(exact=True).weights
                metrics = self.trainer.evaluate(self.index, weights, untrained, tasks)
                return {"evaluated": ins.Evaluated(epoch, tuple(t.task for t in tasks), metrics)}
            case ins.Summarise():
                return {"summary": self.trainer.summarise(instruction)}
        return {}

    def _on_work(self, work: ins.Work) -> Any:
        logs: Mapping[str, Any] = {}
        self._pipeline.overlap = min(work.overlap, self.spec.algorithm.overlap)
        if work.pull:
            yield from self._drained()
            self._pipeline.forget()
        self._times.begin(self.statistics.compute_s)
        for task in work.tasks:
            if self._times.over(work.budget_s):
                break
            if work.look_ahead and task is work.tasks[-1]:
                self._ahead = self._look_ahead(task.task)
            logs = yield from self._train_on(task, want_weights=not work.no_weights)
            began = self.clock()
            while self.client.unanswered > self._pipeline.overlap:
                yield self.client.answer()
            self._take(self._pipeline.settle())
            self.statistics.exchange_s += self.clock() - began
            self._times.spent(task.task, self.statistics.compute_s)
        self._logs = numbers(logs)
        return {}

    def _drained(self) -> Any:
        """Wait for the pushes in flight."""
        began = self.clock()
        while self.client.unanswered:
            yield self.client.answer()
        self._take(self._pipeline.drain())
        self.statistics.exchange_s += self.clock() - began

    def _take(self, answers: Sequence[tuple[FinishedTask, Pushed]]) -> None:
        for done, pushed in answers:
            self.statistics.staleness[pushed.staleness] += 1
            self.statistics.dropped += not pushed.applied
            self.listener.applied(self.name, done.task, pushed)
            self._finished.append(done)

    def _train_on(self, task: Task, *, want_weights: bool) -> Any:
        """Compute a gradient and send it; return the running logs."""
        statistics, began = self.statistics, self.clock()
        if not self._pipeline.holds_weights:
            yield from self.client.travel()
            before = self.client.bytes_received
            self._pipeline.weights()
            yield from self.client.come_back(self.client.bytes_received - before)
        statistics.exchange_s += self.clock() - began
        parts = self._parts(task)
        seconds = self._seconds(parts)
        computed = self.trainer.begin_gradient(self.index, self._computed_on(), [part for _, part in parts])
        yield seconds
        result = computed()
        self._push(task, result, seconds, want_weights=want_weights)
        statistics.compute_s += seconds
        statistics.samples += samples_of(task)
        statistics.steps += 1
        self._epoch_steps += 1
        return result.logs

    def _computed_on(self) -> Pulled:
        """Return the weights of the next gradient."""
        return self._pipeline.weights()

    def _push(self, task: Task, result: StepGradient, seconds: float, *, want_weights: bool) -> None:
        """Push the gradient of a task, which took so many seconds."""
        want_weights = want_weights and task.parts <= 1
        gradient, denominator = result.gradient, result.denominator
        self._send([task], gradient, denominator=denominator, want_weights=want_weights, compute_s=seconds)

    def _send(
        self,
        tasks: Sequence[Task],
        vector: Array,
        *,
        denominator: float = 0.0,
        want_weights: bool = True,
        compute_s: float = 0.0,
    ) -> None:
        """Send a vector that was computed from these tasks; the last of them is reported with the reply."""
        task, samples = tasks[-1], sum(map(samples_of, tasks))
        if self.spec.cluster.shards > 1 and not np.isfinite(vector).all():
            vector = np.full_like(vector, np.nan)  # so that all shards drop it, not only some
        self._pipeline.send(
            FinishedTask(task.task, samples_of(task)),
            vector,
            samples=samples,
            round=task.round,
            part=task.part,
            parts=max(task.parts, 1),
            tasks=[each.task for each in tasks],
            rate=self._rate(samples, denominator),
            denominator=denominator,
            want_weights=want_weights,
            compute_s=compute_s,
        )
        self.statistics.batch_sizes[samples] += 1

    def _rate(self, samples: int, denominator: float) -> float:
        """Return the factor of the learning rate for a vector of so many samples."""
        if self.spec.algorithm.scale_lr:
            return ring_rate(self.spec, self.spec.cluster.workers, self.statistics.steps)
        if self.post.share.rate is None or math.isinf(denominator):
            return self.spec.rate_of(samples, denominator)
        return self.post.share.rate

    def _parts(self, task: Task) -> list[tuple[Machine, Task]]:
        """Return the part of the task of each machine that gets any rows."""
        machines = self.post.group.machines
        if len(machines) == 1 or task.data:
            return [(machines[0], task)]
        counts = proportional_split(task.stop - task.start, [float(rows) for rows in self.post.share.rows])
        stops = np.cumsum(counts) + task.start
        return [
            (machine, replace(task, start=int(stop) - count, stop=int(stop), samples=count))
            for machine, stop, count in zip(machines, stops, counts, strict=True)
            if count
        ]

    def _seconds(self, parts: Sequence[tuple[Machine, Task]]) -> float:
        """Return the seconds of the step: those of its slowest machine plus those of the averaging."""
        now, slowest = self.clock(), 0.0
        for machine, part in parts:
            seconds = machine.seconds(samples_of(part), now)
            self.listener.member_stepped(machine.number, samples_of(part), seconds)
            slowest = max(slowest, seconds)
        return slowest + self.post.group.inside_s
