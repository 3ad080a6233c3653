"""A worker: the loop that requests tasks, computes gradients, pushes, pulls and reports."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.table_rows import RowVector
from nfdt.core.host.start_log import note_start
from nfdt.core.specs.emulation import Emulation
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.core.work.messages import read_instruction, to_request
from nfdt.core.work.spans import COMPUTE, END_OF_EPOCH, EVALUATE, EXCHANGE, LEASE, LEASES, WAIT, SpanRing
from nfdt.core.work.statistics import WorkerStatistics
from nfdt.core.work.tasks import Task
from nfdt.model.backends.contract import PreparedBatch
from nfdt.model.backends.step_result import numbers
from nfdt.model.program.manifest import Manifest
from nfdt.model.training import steps
from nfdt.model.training.data import RowArray
from nfdt.model.training.job_model import JobModel
from nfdt.model.training.sources import RowTaker
from nfdt.model.training.steps import BuiltProgram, is_reusable
from nfdt.transport.base import Pushed
from nfdt.worker.evaluation import Evaluation
from nfdt.worker.look_ahead import LookAhead
from nfdt.worker.movable_client import MovableClient, ShardsMoved
from nfdt.worker.pipeline import Pipeline
from nfdt.worker.task_times import FinishedTask, TaskTimes, report_finished

logger = logging.getLogger(__name__)

TakeRows = Callable[[pb.TakeRowsRequest], pb.TakeRowsReply]
Ask = Callable[[pb.NextRequest], pb.NextReply]
WAIT_S = 10.0


class Worker:
    """Worker that runs one job's tasks with one model until the instruction to leave.

    Args:
        spec: The job.
        name: Name of this worker in the job, as in ``worker-0``.
        index: Number of this worker; determines its random seeds and its emulated speed.
        manifest: Manifest of the program.
        read: Function that returns an artifact's bytes by its sha256.
        open_array: Function that returns an artifact that is a ``.npy`` file as a (memory-mapped) array.
        open_rows: The same for an array of which only some rows are needed; default: ``open_array``.
        client: Client of the shards.
        ask: Function for one call of ``Workers.Next``.
        stopped: Event that is set when the job is over for this worker, also in the middle of an instruction.
        ending: Event that is set when this worker shall leave the job after the step that it has begun; None: never.
        tables: Indices of the variables that the client exchanges by rows.
        take_rows: Function for one call of ``Workers.TakeRows``; None: this worker runs no datasets.
        built: Program of the last job of this process; used again if this job has the same.
        spans: Takes what this worker does; None: it is dropped.
    """

    def __init__(
        self,
        spec: JobSpec,
        name: str,
        index: int,
        manifest: Manifest,
        *,
        read: Callable[[str], bytes],
        open_array: Callable[[str], Array],
        client: MovableClient,
        ask: Ask,
        stopped: threading.Event,
        ending: threading.Event | None = None,
        tables: Sequence[int] = (),
        open_rows: Callable[[str], Array | RowArray] | None = None,
        take_rows: TakeRows | None = None,
        built: BuiltProgram | None = None,
        spans: SpanRing | None = None,
    ) -> None:
        self._spec, self._name, self._index = spec, name, index
        self._spans = spans or SpanRing()
        self._client, self._ask, self._stopped = client, ask, stopped
        self._ending = ending or threading.Event()
        self._pipeline: Pipeline[FinishedTask] = Pipeline(client, spec.algorithm.overlap)
        rows = (
            RowTaker(index, functools.partial(_take_rows, take_rows, name), stopped) if take_rows is not None else None
        )
        if built is not None and built.serves(manifest) and not tables:
            built.restart(manifest, read)
        else:
            built = None
        self._program = built.manifest if built else manifest
        self._job = JobModel(
            spec,
            manifest,
            read,
            open_array,
            open_rows=open_rows,
            number=index,
            owner=lambda: name,
            rows=rows,
            model=built and built.model,
        )
        model, layout = self._job.model, self._job.layout
        self._tables = tables
        self._step = built.step if built else steps.make_step(model, manifest, tables)
        self._evaluate = built.evaluate if built else steps.evaluation_step(model, layout)
        self._predict = built.predict if built else steps.prediction_step(model, layout)
        self._evaluation = Evaluation(self._job, self._evaluate, self._predict, self._advanced)
        self._statistics, self._times = WorkerStatistics(), TaskTimes()
        self._finished: list[FinishedTask] = []  # not reported yet
        self._ahead = LookAhead(ask, name)
        self._batch: tuple[Task, PreparedBatch] | None = None  # of the task that begins next
        self._heartbeat = Heartbeat(self._send_heartbeat, spec.heartbeat_s)
        self._validated: int | None = None  # the epoch whose final weights the pipeline holds, exactly
        self._epoch = self._epoch_steps = 0
        self._logs: dict[str, float] = {}

    @property
    def built(self) -> BuiltProgram | None:
        """Program that the next job of this process may use again; None if it must not."""
        job = self._job
        if not is_reusable(job.manifest, job.model, self._tables):
            return None
        return BuiltProgram(self._program, job.model, self._step, self._evaluate, self._predict)

    def run(self) -> None:
        """Work until the instruction to leave, or until stopped."""
        try:
            self._run()
        finally:
            self._ahead.close()
            self._job.close()

    def _run(self) -> None:
        report = ins.Report()
        while not self._stopped.is_set():
            began = time.perf_counter()
            instruction: ins.Instruction | None = self._ahead.take()
            if instruction is None or self._ending.is_set() or self._client.announced:
                supply = self._job.supply(self._heartbeat)
                instruction = read_instruction(self._ask(self._request(replace(report, supply=supply))))
            answered = time.perf_counter()
            self._statistics.wait_s += answered - began
            self._spans.add(WAIT, began, answered)
            if isinstance(instruction, ins.Leave):
                logger.info("%s leaves: %s", self._name, instruction.reason)
                return
            if self._ending.is_set() and not isinstance(instruction, ins.CollectState | ins.MoveShards):
                if not self._pipeline.in_flight:
                    logger.info("%s leaves, as its process shall end", self._name)
                    return
                instruction = ins.Wait()  # take the replies to its pushes and report them
            report = ins.Report()
            with contextlib.suppress(ShardsMoved):
                report = self._execute(instruction)
            if (kind := _SPAN_OF.get(type(instruction))) is not None:
                self._spans.add(kind, answered, time.perf_counter(), _number_of(instruction), track=LEASES)
            if self._client.announced:
                report = self._move()

    def _execute(self, instruction: ins.Instruction) -> ins.Report:
        if isinstance(instruction, ins.MoveShards):
            self._client.announce(instruction)
            return ins.Report()
        if isinstance(instruction, ins.Work):
            return self._on_work(instruction)
        self._exchange(self._pipeline.drain)
        return self._answer(instruction)

    def _answer(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction other than work; nothing is in flight."""
        match instruction:
            case ins.BeginEpoch():
                return self._on_begin_epoch(instruction)
            case ins.CollectState():
                return self._on_collect_state(instruction)
            case ins.Evaluate():
                return self._on_evaluate(instruction)
            case ins.Summarise():
                return ins.Report(summary=self._job.summarise(instruction))
        return ins.Report()

    def _move(self) -> ins.Report:
        """Connect to restored shards, and drop everything done with those before: return an empty report."""
        self._pipeline.drop()
        self._ahead.take()
        self._times, self._finished, self._batch = TaskTimes(), [], None
        self._validated = None
        self._client.move()
        logger.info("%s continues with the restored shards, incarnation %d", self._name, self._client.incarnation)
        return ins.Report()

    def _send_heartbeat(self) -> None:
        self._ask(pb.NextRequest(worker=self._name, busy=True, incarnation=self._client.incarnation))

    def _advanced(self) -> None:
        """Send heartbeats as an evaluation advances, and end one whose result no longer counts."""
        self._heartbeat()
        if self._client.announced:
            raise ShardsMoved("The shards have moved.")

    def _request(self, report: ins.Report, *begun: int) -> pb.NextRequest:
        """Return a request that reports the finished tasks; ``begun`` are tasks without a push yet."""
        in_flight = frozenset((*(finished.task for finished in self._pipeline.in_flight), *begun))
        done, self._finished = report_finished(self._finished, self._times), []
        request = to_request(replace(report, **done, epoch=self._epoch, logs=self._logs, in_flight=in_flight))
        request.worker, request.incarnation = self._name, self._client.incarnation
        request.wait_s = 0.0 if in_flight else WAIT_S  # with pushes in flight it reports again at once
        request.statistics_json = self._statistics.to_json(self._client, self._spec.algorithm.codec)
        return request

    def _on_begin_epoch(self, begin: ins.BeginEpoch) -> ins.Report:
        self._epoch, self._epoch_steps, self._logs = begin.epoch, 0, {}
        self._pipeline.forget()
        self._job.begin_epoch(begin)
        return ins.Report()

    def _on_work(self, work: ins.Work) -> ins.Report:
        logs: Mapping[str, Any] = {}
        self._pipeline.overlap = min(work.overlap, self._spec.algorithm.overlap)
        if work.untrained:
            self._job.take_untrained(work.untrained)
            self._epoch_steps = 0
        if work.pull:
            self._exchange(self._pipeline.drain)
            self._pipeline.forget()
        self._times.begin(self._statistics.compute_s)
        self._job.prefetch(self._job.train, work.tasks)
        for task, following in zip(work.tasks, (*work.tasks[1:], None), strict=True):
            if self._stopped.is_set() or self._client.announced:
                return ins.Report()  # nothing of this work counts
            if self._ending.is_set() or self._times.over(work.budget_s):
                break
            batch = self._prepared(task)
            if following is None and work.look_ahead:
                self._ahead.begin(self._request(ins.Report(), task.task))
            logs = self._train_on(batch, task, want_weights=not work.no_weights)
            self._prepare_next(following)
            self._exchange(self._pipeline.settle)
            self._times.spent(task.task, self._statistics.compute_s)
        self._logs = numbers(logs)
        return ins.Report()

    def _prepare_next(self, following: Task | None) -> None:
        """Prepare the batch of the following task of this lease or of the next one, while a push is under way."""
        self._batch = None
        if following is None and (ahead := self._ahead.arrived) is not None:
            self._job.prefetch(self._job.train, ahead.tasks)
            following = ahead.tasks[0]
        if following is not None:
            self._batch = following, self._prepared(following)

    def _prepared(self, task: Task) -> PreparedBatch:
        """Return the batch of a task, which may have been prepared."""
        prepared, self._batch = self._batch, None
        if prepared is not None and prepared[0] == task:
            return prepared[1]
        return self._step.prepare(self._job.batch(self._job.train, task))

    def _train_on(self, batch: PreparedBatch, task: Task, *, want_weights: bool) -> Mapping[str, Any]:
        """Compute a gradient and send it."""
        samples = batch.samples
        statistics = self._statistics
        began = time.perf_counter()
        held = self._pipeline.weights()
        pulled = time.perf_counter()
        if not self._statistics.steps:
            note_start(self._name, "first step begins")
        version = self._job.first_update + held.versions[0]
        result = self._step(held.weights, batch, version=version, share=task.share_of(samples))
        gradient: Any = result.gradient if isinstance(result.gradient, RowVector) else np.asarray(result.gradient)
        if not self._statistics.steps:
            note_start(self._name, "first gradient")
            if math.isfinite(first := numbers(result.logs).get("loss", math.nan)):
                self._statistics.first_loss = first
        denominator = 0.0 if result.denominator is None else float(result.denominator)
        self._emulate(time.perf_counter() - pulled, samples)
        computed = time.perf_counter()
        # A gradient that is not finite is pushed as well: all shards drop it and close its round.
        if self._spec.cluster.shards > 1:
            gradient = _all_or_nothing(gradient)
        self._pipeline.send(
            FinishedTask(task.task, samples),
            gradient,
            samples=samples,
            round=task.round,
            part=task.part,
            parts=task.parts,
            tasks=(task.task,),
            tickets=task.ticket,
            rate=self._spec.rate_of(samples, denominator),
            denominator=denominator,
            want_weights=want_weights and task.parts == 1,
            compute_s=computed - pulled,
        )
        sent = time.perf_counter()
        statistics.compute_s += computed - pulled
        statistics.exchange_s += sent - computed + pulled - began
        add = self._spans.add
        add(EXCHANGE, began, pulled, task.task)
        add(COMPUTE, pulled, computed, task.task)
        add(EXCHANGE, computed, sent, task.task)
        statistics.samples += samples
        statistics.steps += 1
        statistics.batch_sizes[samples] += 1
        self._epoch_steps += 1
        self._job.metrics.stepped(samples, result.logs)
        return result.logs

    def _exchange(self, take: Callable[[], list[tuple[FinishedTask, Pushed]]]) -> None:
        """Take replies of the shards; no computation hides the time spent here."""
        began = time.perf_counter()
        for done, pushed in take():
            self._statistics.staleness[pushed.staleness] += 1
            self._statistics.dropped += not pushed.applied
            self._finished.append(done)
        ended = time.perf_counter()
        self._statistics.exchange_s += ended - began
        self._spans.add(EXCHANGE, began, ended)

    def _on_collect_state(self, collect: ins.CollectState) -> ins.Report:
        self._pipeline.forget()  # the weights may be replaced before training continues
        self._job.end_epoch(collect)
        untrained = self._job.untrained.encode()
        state = ins.EpochState(collect.epoch, untrained, self._job.metrics.collect(), self._epoch_steps)
        return ins.Report(epoch_state=state)

    def _on_evaluate(self, request: ins.Evaluate) -> ins.Report:
        if self._validated != request.epoch:
            self._pipeline.forget()
            self._validated = request.epoch
        weights = self._pipeline.weights(exact=True).weights
        return ins.Report(evaluated=self._evaluation.answer(request, weights))

    def _emulate(self, seconds: float, samples: int) -> None:
        """Emulate a slower worker, or one that is killed at a scripted step, as in ``emulate``."""
        emulate: Emulation = self._spec.cluster.emulate
        if emulate.fail and f"{self._index}@{self._statistics.steps + 1}" in emulate.fail.split(","):
            logger.warning("%s is killed at its step %d, as emulate.fail asks", self._name, self._statistics.steps + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = emulate.step_s(self._index, seconds, self._spec.batch_share(samples))
        if wanted > seconds:
            self._stopped.wait(wanted - seconds)


_SPAN_OF: Mapping[type, int] = MappingProxyType(
    {ins.Work: LEASE, ins.Evaluate: EVALUATE, ins.CollectState: END_OF_EPOCH, ins.BeginEpoch: END_OF_EPOCH}
)


def _number_of(instruction: ins.Instruction) -> int:
    """Return the number that the trace shows with an instruction: the tasks of a lease, or an epoch."""
    return len(instruction.tasks) if isinstance(instruction, ins.Work) else getattr(instruction, "epoch", 0)


def _take_rows(call: TakeRows, name: str, iteration: int, pass_index: int, number: int) -> tuple[int, int] | None:
    """Take rows of a dataset for the worker of this name."""
    request = pb.TakeRowsRequest(worker=name, iteration=iteration, number=number)
    setattr(request, "pass", pass_index)  # a Python keyword
    reply = call(request)
    return (reply.begin, reply.end) if reply.end else None


def _all_or_nothing(gradient: Any) -> Any:
    """Return the gradient, or one that every shard drops if a part of it is not finite."""
    if isinstance(gradient, RowVector):
        return gradient if gradient.finite else gradient.filled_with_nan()
    return gradient if np.isfinite(gradient).all() else np.full_like(gradient, np.nan)
