"""A simulated worker: the loop of a real worker, driven by the virtual clock as an activity.

A group of workers that step together, or an allreduce ring, is one simulated worker with several machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from nfdt.core.specs.job import JobSpec
from nfdt.core.training.job_model import samples_of
from nfdt.core.training.ring_rate import ring_rate
from nfdt.core.work import instructions as ins
from nfdt.schedulers import Task
from nfdt.schedulers.proportions import proportional_split
from nfdt.simulate.client import VirtualClient
from nfdt.simulate.events import ActivitySteps, Signal
from nfdt.simulate.machines import Machine, Post
from nfdt.simulate.trainer import Trainer
from nfdt.transport.base import Pushed
from nfdt.worker import wants
from nfdt.worker.loop import WorkerLoop

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
        loop: Its loop.
        statistics: Totals of the loop.
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

    def __post_init__(self) -> None:
        self.loop = WorkerLoop(self.spec, self.client, self.clock, rate=self._rate)
        self.statistics = self.loop.statistics
        self._ahead: Signal | None = None  # fires with the answer to a request that was made ahead
        self._acts: wants.Acts = {
            wants.Ask: self._ask,
            wants.AskAhead: self._ask_ahead,
            wants.TakeAhead: self._take_ahead,
            wants.Prepare: lambda _: None,
            wants.Pull: self._pull,
            wants.Compute: self._compute,
            wants.Overlap: lambda _: None,
            wants.Settle: self._settle,
            wants.Execute: self._execute,
        }

    def run(self) -> ActivitySteps:
        """Run the worker as an activity."""
        loop, acts, answer = self.loop.run(), self._acts, None
        while True:
            try:
                wanted = loop.send(answer)
            except StopIteration:
                return
            answer = acts[type(wanted)](wanted)
            if isinstance(answer, Generator):  # it takes virtual time
                answer = yield from answer

    def _ask(self, wanted: wants.Ask) -> ActivitySteps:
        yield from self.client.travel()
        instruction = self.ask(self.name, wanted.report)
        if isinstance(instruction, Signal):
            began = self.clock()
            instruction = yield instruction
            self.statistics.wait_s += self.clock() - began
        yield from self.client.come_back(0)
        if isinstance(instruction, ins.Evaluate):
            self.loop.pipeline.forget()  # every lease pulls, without virtual time
        return instruction

    def _ask_ahead(self, wanted: wants.AskAhead) -> None:
        answered = self._ahead = self.client.signal()

        def request() -> ActivitySteps:
            yield from self.client.travel()
            instruction = self.ask(self.name, wanted.report)
            yield from self.client.come_back(0)
            answered.fire(instruction)

        self.client.start(request())

    def _take_ahead(self, _: wants.TakeAhead) -> ActivitySteps:
        assert self._ahead is not None
        instruction = yield self._ahead
        return instruction if isinstance(instruction, ins.Work) else None

    def _execute(self, wanted: wants.Execute) -> ins.Report:
        match wanted.instruction:
            case ins.BeginEpoch(epoch, untrained):
                self.trainer.begin_epoch(self.index, epoch, untrained)
            case ins.CollectState(epoch):
                untrained, metrics = self.trainer.collect(self.index)
                return ins.Report(epoch_state=ins.EpochState(epoch, untrained, metrics, self.loop.epoch_steps))
            case ins.Evaluate(epoch, tasks, untrained):
                weights = self.loop.pipeline.weights().weights
                metrics = self.trainer.evaluate(self.index, weights, untrained, tasks)
                return ins.Report(evaluated=ins.Evaluated(epoch, tuple(t.task for t in tasks), metrics))
            case ins.Summarise() as merged:
                return ins.Report(summary=self.trainer.summarise(merged))
        return ins.Report()

    def _pull(self, wanted: wants.Pull) -> ActivitySteps | None:
        """Pull weights; those of an evaluation take no time."""
        if wanted.exact:
            self.loop.pipeline.weights(exact=True)
            return None
        return self._timed_pull()

    def _timed_pull(self) -> ActivitySteps:
        yield from self.client.travel()
        before = self.client.bytes_received
        self.loop.pipeline.weights()
        yield from self.client.come_back(self.client.bytes_received - before)

    def _settle(self, wanted: wants.Settle) -> ActivitySteps:
        while self.client.unanswered > wanted.unanswered:
            yield self.client.answer()
        answers = self.loop.pipeline.settle(wanted.unanswered)
        for sent, pushed in answers:
            self.listener.applied(self.name, sent[-1].task, pushed)
        return answers

    def _compute(self, wanted: wants.Compute) -> ActivitySteps:
        parts = self._parts(wanted.task)
        seconds = self._seconds(parts)
        computed = self.trainer.begin_gradient(self.index, wanted.held, [part for _, part in parts])
        yield seconds
        result = computed()
        return wants.Step(result.gradient, samples_of(wanted.task), result.logs, seconds, result.denominator)

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
