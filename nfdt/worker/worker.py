"""A worker: ask for tasks, compute gradients, push and pull, report. The loop on one screen."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.table_rows import RowVector
from nfdt.core.errors import ProtocolError
from nfdt.core.order import order_crc, sample_order
from nfdt.core.program import unpack
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.optimizer import inner_optimizer
from nfdt.core.specs.emulation import Emulation
from nfdt.core.specs.job import JobSpec
from nfdt.core.training import data, evaluate, gradient_step, merge, untrained_state
from nfdt.core.training.direct_call import Prepared
from nfdt.core.training.metrics import ModelMetrics
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.transport.base import ParameterClient, Pushed
from nfdt.worker.pipeline import Pipeline
from nfdt.worker.statistics import Statistics
from nfdt.worker.task_times import LeaseTimes

logger = logging.getLogger(__name__)

Ask = Callable[[pb.NextRequest], pb.NextReply]
WAIT_S = 10.0


class Worker:
    """Runs one job's tasks with one model until the coordinator says leave.

    Args:
        spec: The job.
        name: This worker's name in the job, as in ``worker-0``.
        index: Its number; decides its random seeds and its emulated speed.
        manifest: The program.
        read: Returns an artifact's bytes by its sha256.
        open_array: Returns an artifact that is a ``.npy`` file as a (memory-mapped) array.
        client: The way to the shards.
        ask: One call of ``Workers.Next``.
        stopped: Set when the job is over for this worker, whatever it is doing.
        tables: Variables, by index, that the client is made for to exchange by rows.
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
        client: ParameterClient,
        ask: Ask,
        stopped: threading.Event,
        tables: Sequence[int] = (),
    ) -> None:
        self._spec, self._name, self._index = spec, name, index
        self._client, self._ask, self._stopped = client, ask, stopped
        self._pipeline: Pipeline[pb.Finished] = Pipeline(client, spec.algorithm.overlap)
        self._open_array = open_array
        self._model = unpack.unpack(manifest, read, allow_code=spec.code)
        self._first_update = int(inner_optimizer(self._model).iterations)
        self._untrained = untrained_state.UntrainedState(self._model, manifest.untrained_rules, worker=index)
        layout = manifest.layout
        self._step = gradient_step.GradientStep(self._model, layout, loss_scale=manifest.loss_scale, tables=tables)
        self._evaluate = evaluate.EvaluateStep(self._model, layout)
        self._metrics = ModelMetrics(self._model)
        self._train = self._source(spec.train)
        self._validation = self._source(spec.validation)
        self._order = lru_cache(maxsize=2)(self._sample_order)
        self._statistics = Statistics()
        self._times = LeaseTimes()
        self._heartbeat = Heartbeat(lambda: ask(pb.NextRequest(worker=name, busy=True)), spec.heartbeat_s)
        self._validated: int | None = None  # the epoch whose final weights the pipeline holds, exactly
        self._epoch = 0
        self._epoch_steps = 0
        self._logs: dict[str, float] = {}

    def run(self) -> None:
        """Work until told to leave or stopped."""
        answer = pb.NextRequest()
        while not self._stopped.is_set():
            began = time.perf_counter()
            reply = self._ask(self._complete(answer))
            self._statistics.wait_s += time.perf_counter() - began
            kind = reply.WhichOneof("instruction")
            if kind == "leave":
                logger.info("%s leaves: %s", self._name, reply.leave.reason)
                return
            instruction = getattr(reply, kind or "wait")
            drained = pb.NextRequest() if kind == "work" else self._drained()
            answer = self._handlers()[kind or "wait"](instruction)
            answer.MergeFrom(drained)

    def _handlers(self) -> dict[str, Callable[[Any], pb.NextRequest]]:
        return {
            "work": self._on_work,
            "wait": lambda _: pb.NextRequest(),
            "begin_epoch": self._on_begin_epoch,
            "collect_state": self._on_collect_state,
            "evaluate": self._on_evaluate,
            "summarise": self._on_summarise,
        }

    def _complete(self, request: pb.NextRequest) -> pb.NextRequest:
        request.worker, request.epoch = self._name, self._epoch
        request.in_flight.extend(finished.task for finished in self._pipeline.in_flight)
        request.wait_s = 0.0 if request.in_flight else WAIT_S  # who can report more does so at once
        for name, value in self._logs.items():
            request.logs[name] = value
        request.statistics_json = self._statistics.to_json(self._client, self._spec.algorithm.codec)
        return request

    def _on_begin_epoch(self, begin: pb.BeginEpoch) -> pb.NextRequest:
        if self._spec.train.samples and begin.order_crc != order_crc(self._order(0)):
            raise ProtocolError(
                f"{self._name}: this machine's NumPy {np.__version__} draws another sample order than the server's. "
                "Install the same NumPy version on both."
            )
        self._epoch, self._epoch_steps, self._logs = begin.epoch, 0, {}
        self._pipeline.forget()
        self._metrics.reset()
        self._take_untrained(begin.untrained)
        return pb.NextRequest()

    def _on_work(self, work: pb.Work) -> pb.NextRequest:
        answer = pb.NextRequest()
        logs: Mapping[str, Any] = {}
        self._pipeline.overlap = min(work.overlap, self._spec.algorithm.overlap)
        if work.untrained:
            self._take_untrained(work.untrained)
            self._epoch_steps = 0
        if work.pull:
            self._exchange(answer, self._pipeline.drain)
            self._pipeline.forget()
        self._times.begin(self._statistics.compute_s)
        batch: Any = None
        for task, following in zip(work.tasks, (*work.tasks[1:], None), strict=True):
            if self._stopped.is_set():
                return answer
            if self._times.over(work.budget_s):
                break
            logs = self._train_on(batch or self._prepared(task), task, want_weights=not work.no_weights)
            batch = self._prepared(following) if following else None  # while the push is on its way
            self._exchange(answer, self._pipeline.settle)
            self._times.spent(task.task, self._statistics.compute_s)
        self._times.fill(answer.finished)
        self._logs = gradient_step.numbers(logs)
        return answer

    def _drained(self) -> pb.NextRequest:
        """Wait for what is in flight, and report it."""
        answer = pb.NextRequest()
        self._exchange(answer, self._pipeline.drain)
        self._times.fill(answer.finished)
        return answer

    def _prepared(self, task: pb.Task) -> Prepared:
        return self._step.prepare(self._batch(self._train, task))

    def _train_on(self, batch: Prepared, task: pb.Task, *, want_weights: bool) -> Mapping[str, Any]:
        """Compute a gradient and send it."""
        samples = task.stop - task.start
        statistics = self._statistics
        began = time.perf_counter()
        held = self._pipeline.weights()
        pulled = time.perf_counter()
        result = self._step(held.weights, batch, version=self._first_update + held.versions[0])
        gradient: Any = result.gradient if isinstance(result.gradient, RowVector) else np.asarray(result.gradient)
        self._emulate(time.perf_counter() - pulled, samples)
        computed = time.perf_counter()
        # A gradient that is not finite is pushed as well: the shards, all of them, drop it and close its round.
        if self._spec.cluster.shards > 1:
            gradient = _all_or_nothing(gradient)
        self._pipeline.send(
            pb.Finished(task=task.task, samples=samples),
            gradient,
            samples=samples,
            round=task.round,
            part=task.part,
            parts=task.parts,
            rate=self._spec.rate_of(samples),
            want_weights=want_weights and task.parts == 1,
            compute_s=computed - pulled,
        )
        statistics.compute_s += computed - pulled
        statistics.exchange_s += time.perf_counter() - computed + pulled - began
        statistics.samples += samples
        statistics.steps += 1
        statistics.batch_sizes[samples] += 1
        self._epoch_steps += 1
        self._metrics.stepped(samples, result.logs)
        return result.logs

    def _exchange(self, answer: pb.NextRequest, take: Callable[[], list[tuple[pb.Finished, Pushed]]]) -> None:
        """Take answers of the shards; what is waited for here, no computation has hidden."""
        began = time.perf_counter()
        for finished, pushed in take():
            self._statistics.staleness[pushed.staleness] += 1
            self._statistics.dropped += not pushed.applied
            answer.finished.append(finished)
        self._statistics.exchange_s += time.perf_counter() - began

    def _on_collect_state(self, collect: pb.CollectState) -> pb.NextRequest:
        self._pipeline.forget()  # where the epoch only stands still, weights may be replaced
        state = pb.EpochState(
            epoch=collect.epoch,
            steps=self._epoch_steps,
            untrained=merge.encode_arrays(self._untrained.read()),
            metrics=self._metrics.collect(),
        )
        return pb.NextRequest(epoch_state=state)

    def _on_evaluate(self, request: pb.Evaluate) -> pb.NextRequest:
        if self._validated != request.epoch:
            self._pipeline.forget()
            self._validated = request.epoch
        weights = self._pipeline.weights(exact=True).weights
        self._take_untrained(request.untrained)
        self._metrics.reset()
        for task in request.tasks:
            self._evaluate(weights, self._batch(self._validation, task))
            self._metrics.stepped(task.stop - task.start)
            self._heartbeat()
        metrics = self._metrics.collect()
        return pb.NextRequest(
            evaluated=pb.Evaluated(epoch=request.epoch, tasks=[t.task for t in request.tasks], metrics=metrics)
        )

    def _on_summarise(self, request: pb.Summarise) -> pb.NextRequest:
        summary = self._metrics.summary(request.metrics, request.validation_metrics, dict(request.logs))
        return pb.NextRequest(summary_json=json.dumps(summary))

    def _take_untrained(self, encoded: bytes) -> None:
        if encoded:
            self._untrained.write(merge.decode_arrays(encoded))

    def _source(self, spec: Any) -> data.ArraySource | None:
        if spec is None or spec.kind != "arrays":
            return None
        return data.ArraySource(spec.structure, [self._open_array(name) for name in spec.arrays])

    def _batch(self, source: data.ArraySource | None, task: pb.Task) -> Any:
        if task.data:
            return data.decode_batch(task.data)
        if source is None:
            raise ProtocolError(f"{self._name}: task {task.task} names rows, but the job has no arrays.")
        return source.batch(self._rows(source, task))

    def _rows(self, source: data.ArraySource, task: pb.Task) -> Any:
        if source is self._validation or not self._spec.fit.shuffle:
            return slice(task.start, task.stop)
        return self._order(getattr(task, "pass"))[task.start : task.stop]

    def _sample_order(self, pass_index: int) -> Array:
        fit = self._spec.fit
        return sample_order(self._spec.train.samples or 0, fit.shuffle, fit.seed, pass_index)

    def _emulate(self, seconds: float, samples: int) -> None:
        """Behave like the worker that ``emulate`` describes: slower, or killed at a scripted step."""
        emulate: Emulation = self._spec.cluster.emulate
        if emulate.fail and f"{self._index}@{self._statistics.steps + 1}" in emulate.fail.split(","):
            logger.warning("%s is killed at its step %d, as emulate.fail asks", self._name, self._statistics.steps + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = emulate.step_s(self._index, seconds, self._spec.batch_share(samples))
        if wanted > seconds:
            self._stopped.wait(wanted - seconds)


def _all_or_nothing(gradient: Any) -> Any:
    """The gradient, or one that every shard drops if a part of it is not finite."""
    if isinstance(gradient, RowVector):
        return gradient if gradient.finite else gradient.spoiled()
    return gradient if np.isfinite(gradient).all() else np.full_like(gradient, np.nan)
