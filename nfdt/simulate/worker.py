"""A simulated worker: the loop of a real worker, driven by the virtual clock as an activity, and its client.

The client is in process, but pushes and replies take virtual time. A group of workers that step together, or an
allreduce ring, is one simulated worker with several machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.member_rows import member_rows
from nfdt.core.work.tasks import Task
from nfdt.model.training.job_model import samples_of
from nfdt.model.training.ring_rate import ring_rate
from nfdt.shard.in_process import InProcessClient, Leaving, reply_bytes
from nfdt.shard.store import ShardStore
from nfdt.simulate.events import Activity, ActivitySteps, Agenda, Signal
from nfdt.simulate.machines import Machine, Post, Road, VirtualNetwork
from nfdt.simulate.trainer import Trainer
from nfdt.transport.base import InFlight, InFlightRequest, Pulled, Pushed, PushOptions, Vector
from nfdt.transport.choice import CodecChoice
from nfdt.worker.driver import LoopDriver, Step
from nfdt.worker.loop import WorkerLoop


class VirtualClient(InProcessClient):
    """An :class:`InProcessClient` whose pushes and replies arrive after their virtual time.

    A push reaches all shards at the same time, when its last part has arrived. The result of a push may be taken only
    once :attr:`unanswered` no longer counts it, because this client cannot wait.

    Args:
        stores: One store per shard, in order.
        layout: Layout of the whole model.
        worker: This worker's name.
        agenda: The virtual clock and its events.
        network: Network with the shards at its end.
        roads: Path to the shards, and back to the worker.
        overlap: Maximum number of unanswered pushes while another one is sent.
        choice: Choice of codecs; None: nothing is encoded.
    """

    def __init__(
        self,
        stores: Sequence[ShardStore],
        layout: ParameterLayout,
        worker: str,
        agenda: Agenda,
        network: VirtualNetwork,
        roads: tuple[Road, Road],
        *,
        overlap: int = 0,
        choice: CodecChoice | None = None,
    ) -> None:
        super().__init__(stores, layout, worker, overlap=overlap, choice=choice)
        self._agenda, self._network, self._alive = agenda, network, True
        self._up, self._down = roads
        self._sent = self._arrived = self._taken = 0
        self._pushes = InFlight(overlap, self._take, lambda count: self._arrived - self._taken >= count)
        self._arrival: Signal | None = None
        self._seconds: dict[int, float] = {}  # of pushes whose replies are not taken

    @property
    def unanswered(self) -> int:
        """Number of pushes whose replies have not arrived."""
        return self._sent - self._arrived

    def answer(self) -> Signal:
        """Return a signal that fires when the next reply arrives."""
        self._arrival = Signal(self._agenda)
        return self._arrival

    def travel(self) -> ActivitySteps:
        """Wait while an empty request travels to the shards."""
        yield self._up.send(self._now, [0] * len(self._stores)) - self._now

    def come_back(self, size: int) -> ActivitySteps:
        """Wait while a reply of ``size`` bytes travels back."""
        yield self._down.send(self._now, self._split(size)) - self._now

    def lose(self) -> None:
        """Mark the worker as gone; its pushes and replies in flight are lost."""
        self._alive = False

    def begin_push(self, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> InFlightRequest[Pushed]:
        """Begin a push as ``ParameterClient`` does; it is sent now."""
        leaving = self._leave(gradient, options)
        sent_at, agenda = self._now, self._agenda
        self._sent += 1
        arrives = self._up.send(sent_at, leaving.sizes)
        agenda.at(arrives, lambda: agenda.at(self._network.applied(arrives), lambda: self._apply(leaving, sent_at)))
        return self._pushes.add(leaving.sequence)

    @property
    def _now(self) -> float:
        return self._agenda.now()

    def _split(self, size: int) -> list[int]:
        """Split the bytes of a reply over the shards in proportion to their weights."""
        total = self._bounds[-1].stop
        return [size * (bound.stop - bound.start) // total for bound in self._bounds]

    def _apply(self, leaving: Leaving, sent_at: float) -> None:
        if not self._alive:
            return
        replies = self._deliver(leaving)
        size = sum(map(reply_bytes, replies))
        arrives = self._down.send(self._now, [reply_bytes(reply) for reply in replies])
        self._seconds[leaving.sequence] = arrives - sent_at
        took = arrives - sent_at - self._network.apply_s
        self._agenda.at(arrives, lambda: self._answered(sum(leaving.sizes), size, took))

    def _answered(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        self._arrived += 1
        if self._coding is not None:
            self._coding.exchanged(sent_bytes, received_bytes, seconds)
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.fire()

    def _take(self, sequence: int) -> Pushed:
        self._taken += 1
        return replace(super()._take(sequence), seconds=self._seconds.pop(sequence))


@dataclass
class SimulatedWorker(LoopDriver):
    """Worker of a simulated job; runs until its instruction is Leave, or :attr:`client` is lost.

    Attributes:
        spec: The job.
        name: Name of this worker in the job.
        index: Number that decides its random seeds.
        post: Machines it computes with.
        trainer: The model.
        client: Client of the shards.
        coordinate: Returns the next instruction, or a signal that fires with it.
        answered: Takes worker, task and reply of each push.
        stepped: Takes machine, samples and seconds of each machine's part of a step.
        agenda: The virtual clock and its events.
        statistics: Totals of its loop.
    """

    spec: JobSpec
    name: str
    index: int
    post: Post
    trainer: Trainer
    client: VirtualClient
    coordinate: Callable[[str, ins.Report], ins.Instruction | Signal]
    answered: Callable[[str, int, Pushed], None]
    stepped: Callable[[int, int, float], None]
    agenda: Agenda

    def __post_init__(self) -> None:
        super().__init__(self.spec, self.client)
        self._clock = self.agenda.now
        self._loop = WorkerLoop(self, self._clock)
        self.statistics = self._loop.statistics
        self._apart, self._counted_apart = False, b""
        self._ahead: Signal | None = None  # fires with the answer to a request that was made ahead

    def run(self) -> ActivitySteps:
        """Run the worker as an activity."""
        loop, answer = self._loop.run(), None
        while True:
            try:
                wanted, *arguments = loop.send(answer)
            except StopIteration:
                return
            answer = wanted(*arguments)
            if isinstance(answer, Generator):  # it takes virtual time
                answer = yield from answer

    def ask(self, report: ins.Report) -> ActivitySteps:
        """Let a report travel, and wait for an instruction."""
        instruction = yield from self._requested(report)
        if isinstance(instruction, ins.Evaluate):
            self.pipeline.discard_weights()  # every lease pulls, without virtual time
        return instruction

    def ask_ahead(self, report: ins.Report) -> None:
        """Let a report travel beside the worker's own steps."""
        answered = self._ahead = Signal(self.agenda)

        def request() -> ActivitySteps:
            answered.fire((yield from self._requested(report)))

        Activity(self.agenda, request())

    def _requested(self, report: ins.Report) -> ActivitySteps:
        """Let a report travel, and the instruction travel back, once there is one."""
        yield from self.client.travel()
        instruction = self.coordinate(self.name, report)
        if isinstance(instruction, Signal):
            began = self._clock()
            instruction = yield instruction
            self.statistics.wait_s += self._clock() - began
        yield from self.client.come_back(0)
        return instruction

    def await_ahead(self) -> ActivitySteps:
        """Wait for the instruction that was requested ahead."""
        assert self._ahead is not None
        instruction = yield self._ahead
        return instruction if isinstance(instruction, ins.Work) else None

    def execute(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction with the shared model, in no virtual time."""
        match instruction:
            case ins.BeginEpoch(epoch, untrained):
                self.trainer.begin_epoch(self.index, epoch, untrained)
            case ins.CollectState(epoch):
                untrained, metrics = self.trainer.collect(self.index)
                return ins.Report(epoch_state=ins.EpochState(epoch, untrained, metrics, self._loop.epoch_steps))
            case ins.Evaluate(epoch, tasks, untrained):
                metrics = self.trainer.evaluate(self.index, self.pipeline.weights().weights, untrained, tasks)
                return ins.Report(evaluated=ins.Evaluated(epoch, tuple(t.task for t in tasks), metrics))
            case ins.Summarise():
                return ins.Report(summary=self.trainer.summarise(instruction))
        return ins.Report()

    def begin_apart(self) -> None:
        """Count the metrics of the next task apart from those that all workers share."""
        self._apart = True

    def end_apart(self) -> bytes:
        """Return the metrics that were counted apart."""
        self._apart = False
        return self._counted_apart

    def pull(self) -> ActivitySteps:
        """Let a request and the weights travel."""
        yield from self.client.travel()
        before = self.client.bytes_received
        self.pipeline.weights()
        yield from self.client.come_back(self.client.bytes_received - before)

    def await_replies(self, unanswered: int) -> ActivitySteps:
        """Wait for replies."""
        while self.client.unanswered > unanswered:
            yield self.client.answer()
        answers = self.pipeline.await_replies(unanswered)
        for tasks, pushed in answers:
            self.answered(self.name, tasks[-1][0].task, pushed)
        return answers

    def compute(self, task: Task, held: Pulled) -> ActivitySteps:
        """Compute a gradient in real time, while its virtual seconds pass."""
        parts = self._parts(task)
        seconds = self._seconds(parts)
        computed = self.trainer.begin_gradient(self.index, held, [part for _, part in parts])
        yield seconds
        if self._apart:
            result, self._counted_apart = self.trainer.apart(computed)
        else:
            result = computed()
        return Step(result.gradient, samples_of(task), result.logs, seconds, result.denominator)

    def rate(self, samples: int, denominator: float) -> float:
        """Return the factor of the learning rate for a vector of so many samples."""
        if self.spec.algorithm.scale_lr:
            return ring_rate(self.spec, self.spec.cluster.workers, self.statistics.steps)
        if self.post.rate is None or math.isinf(denominator):
            return super().rate(samples, denominator)
        return self.post.rate

    def _parts(self, task: Task) -> list[tuple[Machine, Task]]:
        """Return the part of the task of each machine that gets any rows."""
        machines = self.post.machines
        if len(machines) == 1 or task.data:
            return [(machines[0], task)]
        parts = member_rows(task.start, task.stop, self.post.rows)
        return [
            (machine, replace(task, start=start, stop=stop, samples=stop - start))
            for machine, (start, stop) in zip(machines, parts, strict=True)
            if stop > start
        ]

    def _seconds(self, parts: Sequence[tuple[Machine, Task]]) -> float:
        """Return the seconds of the step: those of its slowest machine plus those of the averaging."""
        now, slowest = self._clock(), 0.0
        for machine, part in parts:
            seconds = machine.seconds(samples_of(part), now)
            self.stepped(machine.number, samples_of(part), seconds)
            slowest = max(slowest, seconds)
        return slowest + self.post.inside_s
