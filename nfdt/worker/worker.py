"""A worker: its loop driven by a thread, with the model, the data, the job server and the shards."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import RowVector
from nfdt.core.host.startup import note_start
from nfdt.core.host.usage import UsageMeter
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.emulated_steps import EmulatedSteps
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.core.work.messages import read_instruction, to_request
from nfdt.core.work.spans import WAIT, SpanRing
from nfdt.core.work.tasks import Task
from nfdt.model.backends.contract import LocalStep, PreparedBatch, current
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.unpack import ReadRanges
from nfdt.model.training import steps
from nfdt.model.training.data import RowArray
from nfdt.model.training.graph_source import RowTaker
from nfdt.model.training.host_batches import rows_of
from nfdt.model.training.job_model import JobModel
from nfdt.model.training.metric_states import numbers
from nfdt.model.training.metrics import MetricsAside
from nfdt.model.training.predict import OUTPUT_BYTES, dump_outputs
from nfdt.model.training.steps import BuiltProgram, is_reusable
from nfdt.transport.base import PendingRows, Pulled
from nfdt.worker.driver import LoopDriver, Step
from nfdt.worker.local_weights import LocalWeights
from nfdt.worker.loop import WorkerLoop, drive
from nfdt.worker.movable_client import MovableClient
from nfdt.worker.pipeline import ShardsMoved

logger = logging.getLogger(__name__)

TakeRows = Callable[[pb.TakeRowsRequest], pb.TakeRowsReply]
CallNext = Callable[[pb.NextRequest], pb.NextReply]
Answer = TypeVar("Answer")
WAIT_S = 10.0
STATE_SHARE = 0.03  # of the time, in which the variables of optimizers that step here may travel


class Worker(LoopDriver):
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
        read_ranges: Function that returns ranges of an artifact's bytes, if these variables are on the shards alone.
        take_rows: Function for one call of ``Workers.TakeRows``; None: this worker runs no datasets.
        devices: Devices on which its steps compute.
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
        read: Callable[[str], bytes | memoryview],
        open_array: Callable[[str], Array],
        client: MovableClient,
        ask: CallNext,
        stopped: threading.Event,
        ending: threading.Event | None = None,
        tables: Sequence[int] = (),
        read_ranges: ReadRanges | None = None,
        devices: tuple[str, ...] = (),
        open_rows: Callable[[str], Array | RowArray] | None = None,
        take_rows: TakeRows | None = None,
        built: BuiltProgram | None = None,
        spans: SpanRing | None = None,
    ) -> None:
        super().__init__(spec, client)
        self._name, self._index = name, index
        self._spans = spans or SpanRing()
        self._client, self._call, self._stopped, self._ending = client, ask, stopped, ending or threading.Event()
        self._loop = WorkerLoop(self, time.perf_counter, self._spans.add)
        rows = (
            RowTaker(index, functools.partial(_take_rows, take_rows, name), stopped) if take_rows is not None else None
        )
        if built is not None and built.serves(manifest, devices, spec.algorithm.local_rate) and not tables:
            built.restart(manifest, read)
        else:
            built = None
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
            tables=() if read_ranges is None else tables,
            read_ranges=read_ranges,
        )
        model, layout = self._job.model, self._job.layout
        self._tables = tables
        self._evaluated_rows = steps.evaluated_rows(model, spec.method)
        self._program = built or BuiltProgram(
            manifest,
            model,
            steps.make_step(model, manifest, tables, self._job.copies(devices, tables), rate=spec.algorithm.local_rate),
            steps.evaluation_step(model, layout),
            steps.prediction_step(model, layout),
            devices,
            spec.algorithm.local_rate,
        )
        step = self._program.step
        self._own = LocalWeights(step) if isinstance(step, LocalStep) and spec.algorithm.exchange_facts.local else None
        self._requested: tuple[PreparedBatch, int, PendingRows] | None = None  # rows of a batch, and for which reply
        self._of_the_epoch: MetricsAside | None = None  # while a task is counted apart
        self._other_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{name} looks ahead")
        self._ahead: Future[ins.Instruction] | None = None  # answer to a request that was made ahead
        self._batch: tuple[Task, PreparedBatch] | None = None  # of the task that begins next
        self._emulated = EmulatedSteps(spec, index, name, stopped.wait)
        self._reported_at = time.perf_counter()  # with the variables of optimizers
        self._heartbeat = Heartbeat(self._send_heartbeat, spec.busy_report_s)
        self._usage = UsageMeter()

    @property
    def built(self) -> BuiltProgram | None:
        """Program that the next job of this process may use again; None if it must not."""
        return self._program if self._may_serve_again() else None

    def _may_serve_again(self) -> bool:
        # Copies on other devices keep seeds of their own.
        alone = len(self._program.devices) < 2 or not current().copies_models
        return alone and is_reusable(self._job.manifest, self._job.model, self._tables)

    def run(self) -> None:
        """Work until the instruction to leave, or until stopped."""
        try:
            logger.info("%s leaves: %s", self._name, drive(self._loop.run()))
        finally:
            self._other_thread.shutdown()  # the time limit of a call under way is that of the calls
            self._job.close()

    def stopped(self) -> bool:
        """Return whether the job is over for this worker."""
        return self._stopped.is_set()

    def ending(self) -> bool:
        """Return whether this process shall end."""
        return self._ending.is_set()

    def moved(self) -> bool:
        """Return whether newer shards have been announced."""
        return self._client.announced

    def _waited(self, call: Callable[[], Answer]) -> Answer:
        """Call a function that waits for an instruction."""
        began = time.perf_counter()
        instruction = call()
        answered = time.perf_counter()
        self._loop.statistics.wait_s += answered - began
        self._spans.add(WAIT, began, answered)
        return instruction

    def ask(self, report: ins.Report) -> ins.Instruction:
        """Request the next instruction, when a batch waits if a dataset runs here."""

        def call() -> ins.Instruction:
            supply = self._job.supply(self._heartbeat)
            return read_instruction(self._call(self._request(replace(report, supply=supply))))

        return self._waited(call)

    def ask_ahead(self, report: ins.Report) -> None:
        """Request the next instruction on another thread."""
        request = self._request(report)
        self._ahead = self._other_thread.submit(lambda: read_instruction(self._call(request)))

    def await_ahead(self) -> ins.Work | None:
        """Wait for the answer; any but work is dropped, because it is given again when the task is finished."""
        ahead, self._ahead = self._ahead, None
        instruction = None if ahead is None else self._waited(ahead.result)
        return instruction if isinstance(instruction, ins.Work) else None

    def _request(self, report: ins.Report) -> pb.NextRequest:
        request = to_request(report)
        request.worker, request.incarnation = self._name, self._client.incarnation
        request.wait_s = 0.0 if report.in_flight else WAIT_S  # with pushes in flight it reports again at once
        codec = self.spec.algorithm.codec
        request.statistics_json = self._loop.statistics.to_json(self._client, codec, **self._usage.of_process())
        return request

    def execute(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction with the job's model and data."""
        job = self._job
        match instruction:
            case ins.Work():
                job.load_untrained(instruction.untrained)
            case ins.MoveShards():
                self._client.announce(instruction)
            case ins.BeginEpoch():
                job.begin_epoch(instruction)
            case ins.CollectState():
                job.end_epoch(instruction)
                kept = () if instruction.last or self._may_report_optimizers() else job.of_optimizers[0]
                state = job.untrained.encode(kept), job.metrics.collect(), self._loop.epoch_steps
                return ins.Report(epoch_state=ins.EpochState(instruction.epoch, *state))
            case ins.Evaluate():
                with job.aside(instruction.ahead):
                    return ins.Report(evaluated=self._evaluated(instruction, self.pipeline.weights()))
            case ins.Summarise():
                return ins.Report(summary=job.summarise(instruction))
        return ins.Report()

    def _may_report_optimizers(self) -> bool:
        """Whether the variables of optimizers that step here travel in a small share of the time, there and back.

        All workers report together, over the one link of the server.
        """
        if self._own is None:
            return True
        statistics, now = self._loop.statistics, time.perf_counter()
        travelled = self._client.bytes_sent + self._client.bytes_received
        moved = 2 * self.spec.cluster.workers * self._job.of_optimizers[1]
        needs_s = moved / max(travelled, 1) * statistics.push_s
        if needs_s > STATE_SHARE * (now - self._reported_at):
            return False
        self._reported_at = now
        return True

    def _evaluated(self, request: ins.Evaluate, held: Pulled) -> ins.Evaluated:
        """Evaluate the model on pulled weights; a job that predicts may leave out the last tasks."""
        self.forget()
        job, source = self._job, self._job.validation
        job.load_untrained(request.untrained)
        job.begin_validation(request.epoch)
        job.prefetch(source, request.tasks)
        if job.spec.method == "predict":
            return self._predicted(request, held)
        batches = ((batch, rows_of(batch)) for batch in (job.batch(source, task) for task in request.tasks))

        def evaluate(batch: Any) -> dict[str, Any]:
            return self._program.evaluate(self._with_rows(held, batch), batch)

        metrics = job.evaluate(batches, evaluate, self._advanced)
        return ins.Evaluated(request.epoch, tuple(task.task for task in request.tasks), metrics)

    def _predicted(self, request: ins.Evaluate, held: Pulled) -> ins.Evaluated:
        """Predict until the outputs fill an answer; the tasks that are left out are leased again."""
        outputs: dict[int, list[Array]] = {}
        done, size = [], 0
        for task in request.tasks:
            batch = self._job.batch(self._job.validation, task)
            outputs[task.start] = leaves = self._program.predict(self._with_rows(held, batch), batch)
            done.append(task.task)
            self._advanced()
            size += sum(leaf.nbytes for leaf in leaves)
            if size >= OUTPUT_BYTES:
                break
        return ins.Evaluated(request.epoch, tuple(done), dump_outputs(outputs))

    def _with_rows(self, held: Pulled, batch: Any) -> Any:
        """Return weights for the evaluation of a batch: with its rows, if tables are on the shards."""
        if self._evaluated_rows is None:
            return held.weights
        return RowVector(held.weights, self._client.begin_lookup(self._evaluated_rows(batch), held.sequence).result())

    def metrics(self) -> bytes:
        """Return the state of the metrics since the epoch began."""
        return self._job.metrics.collect()

    def begin_apart(self) -> None:
        """Count the metrics of the next task apart from those of the epoch."""
        self._of_the_epoch = self._job.metrics.set_aside()

    def end_apart(self) -> bytes:
        """Return the metrics that were counted apart, and count those of the epoch again."""
        assert self._of_the_epoch is not None, "a task has begun to count apart"
        counted = self._job.metrics.collect()
        self._job.metrics.take_back(self._of_the_epoch)
        return counted

    def move(self) -> None:
        """Connect to the shards announced last."""
        self.await_ahead()
        self._batch = self._requested = None
        self.forget()
        self._client.move()
        logger.info("%s continues with the restored shards, incarnation %d", self._name, self._client.incarnation)

    def _send_heartbeat(self) -> None:
        self._call(pb.NextRequest(worker=self._name, busy=True, incarnation=self._client.incarnation))

    def _advanced(self) -> None:
        """Send heartbeats as an evaluation advances, and end one whose result no longer counts."""
        self._heartbeat()
        if self._client.announced:
            raise ShardsMoved("The shards have moved.")

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Read ahead, and convert the first batch."""
        parts = [part for task in tasks for part in self._batches_of(task)]
        self._job.prefetch(self._job.train, parts)
        self._batch = parts[0], self._prepared(parts[0])

    def overlap(self, step: Step, following: Task | None) -> None:
        """Count a step, and prepare the batch of the following task of this lease or of the next one."""
        if self._own is None:
            self._job.metrics.stepped(step.samples, step.logs)
        self._batch = None
        ahead = self._ahead
        if following is None and ahead is not None and ahead.done() and ahead.exception() is None:
            if isinstance(work := ahead.result(), ins.Work):
                self._job.prefetch(self._job.train, work.tasks)
                following = work.tasks[0]
        if following is not None:
            first = self._batches_of(following)[0]
            self._batch = first, self._prepared(first)
            self._request_rows(following, self._batch[1])

    def _prepared(self, task: Task) -> PreparedBatch:
        """Return the batch of a task, which may have been prepared."""
        prepared, self._batch = self._batch, None
        if prepared is not None and prepared[0] == task:
            return prepared[1]
        return self._program.step.prepare(self._job.batch(self._job.train, task))

    def _batches_of(self, task: Task) -> list[Task]:
        """Return a task for each batch of a task; with steps of the worker's own it may have several."""
        return [task] if self._own is None else self._job.batches_of(task)

    def compute(self, task: Task, held: Pulled) -> Step:
        """Compute a gradient, or make steps of the model's own optimizer; emulation may lengthen them."""
        return self._gradient(task, held) if self._own is None else self._step_alone(self._own, task, held)

    def _step_alone(self, own: LocalWeights, task: Task, held: Pulled) -> Step:
        """Train the model on the batches of a task; go on from the reply to the last push as soon as it is there."""
        step, job, statistics = self._program.step, self._job, self._loop.statistics
        assert isinstance(step, LocalStep)
        own.follow(held)
        began, samples, done = time.perf_counter(), 0, 0
        logs: dict[str, Any] = {}
        for part in self._batches_of(task):
            if self.stopped() or self.moved():
                break  # nothing of this task counts
            if done and self.pipeline.take_arrived():
                own.follow(self.pipeline.weights())
            batch, step_began = self._prepared(part), time.perf_counter()
            if not statistics.steps + done:
                note_start(self._name, "first step begins")
            logs = step.train(batch, job.position_of(part))
            own.stepped()
            if not statistics.steps + done and math.isfinite(first := numbers(logs).get("loss", math.nan)):
                statistics.first_loss = first
            done += 1
            self._emulated.finish(statistics.steps + done, time.perf_counter() - step_began, batch.samples)
            job.metrics.stepped(batch.samples, logs)
            samples += batch.samples
            self._heartbeat()
        planned = self.spec.train.planned is not None  # of others, a lease is pushed at once
        return Step(None, samples, logs, time.perf_counter() - began, due=planned, batches=done)

    def difference(self, held: Array) -> Array:
        """Return what the steps since the last push have changed."""
        assert self._own is not None, "only such steps push nothing"
        self._own.follow(self.pipeline.weights())
        return self._own.difference()

    def forget(self) -> None:
        """Go on from the weights of the last reply, without the steps that pushed nothing."""
        if self._own is not None:
            self._own.forget()

    def _gradient(self, task: Task, held: Pulled) -> Step:
        batch, is_first = self._prepared(task), not self._loop.statistics.steps
        weights = self._looked_up(batch, held)
        began = time.perf_counter()
        if is_first:
            note_start(self._name, "first step begins")
        version = self._job.first_update + held.versions[0]
        result = self._program.step(weights, batch, version=version, share=task.share_of(batch.samples))
        gradient: Any = result.gradient
        if not isinstance(gradient, RowVector | Pieces):
            gradient = np.asarray(gradient)
        if is_first:
            note_start(self._name, "first gradient")
            if math.isfinite(first := numbers(result.logs).get("loss", math.nan)):
                self._loop.statistics.first_loss = first
        denominator = 0.0 if result.denominator is None else float(result.denominator)
        self._emulated.finish(self._loop.statistics.steps + 1, time.perf_counter() - began, batch.samples)
        return Step(gradient, batch.samples, result.logs, time.perf_counter() - began, denominator)

    def _request_rows(self, task: Task, batch: PreparedBatch) -> None:
        """Request the rows of the next batch behind the push on its way, on whose reply its gradient is computed."""
        numbers_of = self._program.step.row_numbers
        # With overlap it is not known which reply that will be; in a round weights are pulled after its end.
        if numbers_of is None or self.spec.algorithm.overlap or task.parts > 1:
            return
        if (sequence := self.pipeline.newest) is not None:
            self._requested = batch, sequence, self._client.begin_lookup(numbers_of(batch), sequence)

    def _looked_up(self, batch: PreparedBatch, held: Pulled) -> Any:
        """Return weights for a step on a batch: with its rows, if tables are on the shards."""
        numbers_of = self._program.step.row_numbers
        if numbers_of is None:
            return held.weights
        began = time.perf_counter()
        requested, self._requested = self._requested, None
        if requested is not None and requested[0] is batch and requested[1] == held.sequence:
            rows = requested[2].result()
        else:
            rows = self._client.begin_lookup(numbers_of(batch), held.sequence).result()
        self._loop.statistics.exchange_s += time.perf_counter() - began
        return RowVector(held.weights, rows)


def _take_rows(call: TakeRows, name: str, iteration: int, pass_index: int, number: int) -> tuple[int, int] | None:
    """Take rows of a dataset for the worker of this name."""
    request = pb.TakeRowsRequest(worker=name, iteration=iteration, number=number)
    setattr(request, "pass", pass_index)  # a Python keyword
    reply = call(request)
    return (reply.begin, reply.end) if reply.end else None
