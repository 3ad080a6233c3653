"""A job on one rank, which executes the instructions that rank 0 broadcasts."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hfdt.runtime.artifacts import ReadableArtifacts
from hfdt.runtime.batch_split import prepared_ahead, split_rows, weight_of
from hfdt.runtime.communicator import Communicator
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ProtocolError
from nfdt.core.host.usage import UsageMeter
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.emulated_steps import EmulatedSteps
from nfdt.core.work.spans import END_OF_EPOCH, EVALUATE, STEP, SpanRing
from nfdt.core.work.statistics import BY_RANK, codec_totals, step_totals
from nfdt.core.work.tasks import Task
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State, load_state
from nfdt.model.training import data, merge
from nfdt.model.training.data import BatchSource
from nfdt.model.training.host_batches import rows_of
from nfdt.model.training.job_model import JobModel
from nfdt.model.training.metric_states import merge_metric_states, numbers
from nfdt.model.training.ring_rate import ring_rate


class RingJob:
    """One job on one rank. All public methods are collective unless documented otherwise.

    Args:
        spec: Specification of the job, with the batch of one rank in ``fit.batch_size``.
        communicator: The ranks.
        artifacts: Artifacts of the job.
        number: Number of this rank among the job's workers, for seeds and ``emulate``; default: its rank.
        spans: Records what this rank does; None: nothing is recorded.

    Attributes:
        advanced: Called after each step and each validation batch; sends the heartbeat of rank 0.
    """

    def __init__(
        self,
        spec: JobSpec,
        communicator: Communicator,
        artifacts: ReadableArtifacts,
        *,
        number: int | None = None,
        spans: SpanRing | None = None,
    ) -> None:
        self.spec, self._communicator = spec, communicator
        self._spans = spans or SpanRing()
        self._usage = UsageMeter()
        self._number = communicator.rank if number is None else number
        self._emulated = EmulatedSteps(spec, self._number, f"rank {self._number}")
        manifest = Manifest.from_bytes(artifacts.read(spec.program))
        self._rules = manifest.untrained_rules
        self._part = JobModel(
            spec,
            manifest,
            artifacts.read,
            artifacts.open_array,
            open_rows=artifacts.open_rows,
            number=self._number,
            owner=lambda: f"rank {communicator.rank}",
        )
        model = self._part.model
        self.step = self._make_step(manifest, load_state(artifacts.path(manifest.state)))
        self._test = communicator.test_step(model, manifest)
        self._metrics, self._untrained = self._part.metrics, self._part.untrained
        self._base: list[Array] = []
        self._logs: Mapping[str, Any] = {}
        self._epoch_samples = self._epoch_steps = self.steps = 0
        self.compute_s = 0.0
        self.samples = self._own_samples = 0
        self._by_rank: list[dict[str, Any]] = []
        self.advanced: Callable[[], None] = lambda: None

    def _make_step(self, manifest: Manifest, state: State) -> Any:
        scaled = self.spec.algorithm.scale_lr is not None
        codec = self.spec.algorithm.codec
        return self._communicator.training_step(self._part.model, manifest, state, codec, scales=scaled)

    def execute(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction on all ranks; the report of rank 0 is sent to the coordinator."""
        began = time.perf_counter()
        match instruction:
            case ins.Work():
                return self._on_work(instruction)
            case ins.BeginEpoch():
                return self._on_begin_epoch(instruction)
            case ins.CollectState():
                report, kind = self._on_collect_state(instruction), END_OF_EPOCH
            case ins.Evaluate():
                report, kind = self._on_evaluate(instruction), EVALUATE
            case _:
                raise ProtocolError(
                    f"Rank {self._communicator.rank}: expected an instruction. Received: {instruction}."
                )
        self._spans.add(kind, began, time.perf_counter(), instruction.epoch)
        self._spans.flush()  # the ring may end with the job
        return report

    def _on_begin_epoch(self, begin: ins.BeginEpoch) -> ins.Report:
        self._part.begin_epoch(begin)
        self._epoch_samples = self._epoch_steps = 0
        self._logs = {}
        self._base = self._untrained.read()
        return ins.Report()

    def _on_work(self, work: ins.Work) -> ins.Report:
        if work.untrained:
            self._part.load_untrained(work.untrained)
            self._base, self._epoch_steps = self._untrained.read(), 0
        counted: dict[int, int] = {}
        steps = self._steps_of(work)
        if self.spec.train.sized:
            self._part.prefetch(self._part.train, [self._own_rows(tasks) for tasks in steps])
        with contextlib.closing(self._parts_of(steps)) as parts:
            for tasks in steps:
                began = time.perf_counter()
                counted |= self._train_on(tasks, next(parts))
                ended = time.perf_counter()
                self.compute_s += ended - began
                self._spans.add(STEP, began, ended, self.steps)
                self.advanced()
        return ins.Report(
            finished=tuple(task.task for task in work.tasks),
            epoch=work.epoch,
            logs=self._running_logs(),
            samples={task.task: task.stop - task.start for task in work.tasks} | counted,
        )

    def _own_rows(self, tasks: list[Task]) -> Task:
        """Return this rank's rows of a global batch of rows, as a task."""
        start, stop = self._split(tasks[0].start, tasks[-1].stop)
        return replace(tasks[0], start=start, stop=stop)

    def _steps_of(self, work: ins.Work) -> list[list[Task]]:
        return global_batches(work.tasks)

    def _parts_of(self, steps: Sequence[list[Task]]) -> Generator[tuple[Any, int]]:
        """Yield this rank's part of each step, see :meth:`_own_part`."""
        # A round of whole batches has no parts: each rank reads one of its batches in the step itself.
        source = self._part.train
        if source is not None and source.whole:
            yield from itertools.repeat((None, 0), len(steps))
        else:
            yield from prepared_ahead(self._prepared_part, steps)

    def _prepared_part(self, tasks: list[Task]) -> tuple[Any, int]:
        batch, rows = self._own_part(tasks, self._part.train)
        return batch if batch is None else self.step.prepare(batch), rows

    def _train_on(self, tasks: list[Task], part: tuple[Any, int]) -> dict[int, int]:
        """Train on a step, given this rank's part; return the samples of each task whose batch was counted here."""
        if self.spec.algorithm.scale_lr:
            self.step.set_factor(ring_rate(self.spec, self._communicator.size, self.steps))
        source = self._part.train
        if source is not None and source.whole:
            batch, rows, counted = self._whole_part(tasks, source)
            total = sum(counted.values())
        else:
            batch, rows = part
            counted, total = {}, sum(task.stop - task.start for task in tasks)
        logs = self._step_on(tasks, batch, rows, total)
        self.steps += 1
        self.samples += total
        if rows:
            self._logs = logs
            self._metrics.stepped(rows, logs)
            self._epoch_samples += rows
            self._own_samples += rows
            self._epoch_steps += 1
        return counted

    def _step_on(self, tasks: list[Task], batch: Any, rows: int, total: int) -> Mapping[str, Any]:
        """Train on this rank's rows of a step of ``total``; return the logs of ``train_step``, empty without rows."""
        return self.step(batch, weight_of(rows, total), partial(self._emulate, rows) if self._emulated.active else None)

    def _whole_part(self, tasks: list[Task], source: BatchSource) -> tuple[Any, int, dict[int, int]]:
        """Return this rank's batch of a round, its rows, and the samples of each task; None without a batch."""
        rank, batch, rows = self._communicator.rank, None, 0
        if rank < len(tasks):
            self._part.prefetch(source, [tasks[rank]])
            batch = self._part.batch(source, tasks[rank])
            rows = rows_of(batch)
        counts = self._communicator.gather_json(rows)
        return batch, rows, {task.task: count for task, count in zip(tasks, counts, strict=False)}

    def _own_part(self, tasks: list[Task], source: BatchSource | None) -> tuple[Any, int]:
        """Return this rank's rows of a global batch, and their number; None without rows."""
        if tasks[0].data:
            return self._fed_part(tasks)
        own = self._own_rows(tasks)
        if source is not None and own.start == own.stop:
            return None, 0
        return self._part.rows(source, tasks[0], own.start, own.stop), own.stop - own.start

    def _fed_part(self, tasks: list[Task]) -> tuple[Any, int]:
        """Return this rank's batch, if the client fed one for it, and its number of rows."""
        rank = self._communicator.rank
        if rank >= len(tasks):
            return None, 0
        return data.decode_batch(tasks[rank].data), tasks[rank].stop - tasks[rank].start

    def _split(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of the rows ``[start, stop)`` that this rank computes."""
        return split_rows(start, stop, self._communicator.size, self._communicator.rank)

    def _running_logs(self) -> dict[str, float]:
        """Return the running logs of the epoch: the mean over all ranks, weighted by their samples."""
        own = {"samples": self._epoch_samples, "logs": numbers(self._logs), "totals": self._own_totals()}
        reports = self._communicator.gather_json(own)
        self._by_rank = [report["totals"] for report in reports]
        found: dict[str, list[tuple[float, int]]] = {}
        for report in reports:
            for name, value in report["logs"].items():
                found.setdefault(name, []).append((value, report["samples"]))
        return {name: sum(v * n for v, n in pairs) / (sum(n for _, n in pairs) or 1) for name, pairs in found.items()}

    def _on_collect_state(self, collect: ins.CollectState) -> ins.Report:
        self._require_equal_weights()
        self._part.end_epoch(collect)
        steps = self._communicator.gather_json(self._epoch_steps)
        own = merge.encode_arrays(self._untrained.read())
        untrained = [merge.decode_arrays(part) for part in self._communicator.gather(own)]
        metrics = self._epoch_metrics()
        if not self._communicator.leads:
            return ins.Report()
        states = [(rank, steps[rank], arrays) for rank, arrays in enumerate(untrained)]
        merged = merge.merge_untrained(self._rules, self._base, states) if self._rules else []
        encoded = merge.encode_changed(merged, self._base) if merged else b""
        counted = merge_metric_states(metrics)
        return ins.Report(epoch_state=ins.EpochState(collect.epoch, encoded, counted, max(steps)))

    def _epoch_metrics(self) -> list[bytes]:
        return self._communicator.gather(self._metrics.collect())

    def _on_evaluate(self, request: ins.Evaluate) -> ins.Report:
        self._part.load_untrained(request.untrained)
        self._part.begin_validation(request.epoch)
        own = self._part.evaluate(self._evaluated_parts(request.tasks), self._test, self.advanced)
        merged = merge_metric_states(self._communicator.gather(own))
        return ins.Report(evaluated=ins.Evaluated(request.epoch, tuple(t.task for t in request.tasks), merged))

    def _evaluated_parts(self, tasks: Sequence[Task]) -> Iterator[tuple[Any, int]]:
        """Yield this rank's part of each task: some of its rows, or the whole batch of one rank."""
        source, communicator = self._part.validation, self._communicator
        if source is None or not source.whole:
            yield from (self._own_part([task], source) for task in tasks)
            return
        self._part.prefetch(source, tasks[communicator.rank :: communicator.size])
        for number, task in enumerate(tasks):
            batch = self._part.batch(source, task) if number % communicator.size == communicator.rank else None
            yield batch, 0 if batch is None else rows_of(batch)

    def summarise(self, merged: ins.Summarise) -> ins.Report:
        """Convert merged metrics to logs. Only rank 0 calls it."""
        return ins.Report(summary=self._part.summarise(merged))

    def _own_totals(self) -> dict[str, Any]:
        """Return the totals of this rank, and its process."""
        totals = step_totals(self._own_samples, self.steps, self.compute_s, self.compute_s)
        process = {"host": socket.gethostname(), "pid": os.getpid(), "device": self._communicator.device_name()}
        return {**totals, **self._usage.of_process(), **process}

    def statistics(self, **more: int) -> dict[str, Any]:
        """Return the totals of all ranks, in the form of one worker's, with additional ones."""
        return {
            **step_totals(self.samples, self.steps, self.compute_s, self.compute_s),
            "ranks": self._communicator.size,
            BY_RANK: self._by_rank,
            **more,
            **codec_totals(self.spec.algorithm.codec, {}),
        }

    def _require_equal_weights(self) -> None:
        """Check that all ranks have the same weights, as they applied the same updates.

        Raises:
            ProtocolError: the weights differ.
        """
        state = self.step.read()
        crc = zlib.crc32(state.weights.data)
        for array in state.optimizer.values():
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
        sums = self._communicator.gather_json(crc)
        different = [rank for rank, other in enumerate(sums) if other != sums[0]]
        if different:
            raise ProtocolError(
                f"Weights after {self.steps} steps: expected the same on all ranks. Received: others than rank 0's on "
                f"ranks {different}. A train_step that assigns weights by itself, or ranks whose processors "
                "compute differently, do that."
            )

    def _emulate(self, rows: int, seconds: float) -> None:
        """Let a step of this rank end as ``emulate`` describes."""
        self._emulated.finish(self._new_step, seconds, rows)

    @property
    def _new_step(self) -> int:
        """Number of the step that has begun, counted from 1; 0 if it is computed again."""
        return self.steps + 1


def global_batches(tasks: Iterable[Task]) -> list[list[Task]]:
    """Group tasks into steps: one step per task, or one for the fed batches of a round."""
    groups: list[list[Task]] = []
    for task in tasks:
        if task.part and groups and groups[-1][0].round == task.round:
            groups[-1].append(task)
        else:
            groups.append([task])
    return groups
