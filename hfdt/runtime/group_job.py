"""A job in a group of workers: its members train synchronously, and the parameter server sees one worker."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hfdt.runtime.artifacts import ReadableArtifacts
from hfdt.runtime.batch_split import weight_of
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.group_step import GroupExchange, GroupStep
from hfdt.runtime.job import RingJob
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.member_rows import member_rows
from nfdt.core.work.spans import SpanRing
from nfdt.core.work.statistics import BY_RANK, codec_totals, push_totals, step_totals
from nfdt.core.work.tasks import Task
from nfdt.model.backends.variables import assign_values
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.model.training import data
from nfdt.model.training.data import BatchSource
from nfdt.model.training.host_batches import rows_of

LEAST = 4  # smallest number of blocks of each kind
ROUNDS = 9  # measured blocks, both of steps of a whole batch and of a part of it
PART = 4
MEASURE_S = 5.0
RING_ROUNDS = 4  # timed allreduces; the fastest counts
RING_SIZE = 2_500_000  # maximum number of elements of a timed allreduce
RECENT = 19  # latest blocks that are reported, for an estimate of speed
BLOCK_S = 0.06


class StepTimer:
    """Timer that averages consecutive steps with equal numbers of rows, over blocks of at least :data:`BLOCK_S`.

    A step that takes longer is a block by itself.

    Attributes:
        blocks: Number of completed blocks.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._rows = self._steps = 0
        self._seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """Add the duration of a step with this number of rows."""
        if rows != self._rows:
            self._rows, self._steps, self._seconds = rows, 0, 0.0  # a block that is too short is dropped
        self._steps += 1
        self._seconds += seconds
        if self._seconds >= BLOCK_S:
            self._recent.append((rows, self._seconds / self._steps))
            self.blocks += 1
            self._steps, self._seconds = 0, 0.0

    def summary(self) -> list[Any]:
        """Return the number of blocks, and the latest ones as (rows, seconds of a step), ready for JSON."""
        return [self.blocks, [(rows, round(seconds, 7)) for rows, seconds in self._recent]]


class GroupJob(RingJob):
    """A job on one rank of a group: the optimizer's step is an exchange with the parameter server.

    Args:
        spec: The job, with the batch of one member in ``fit.batch_size``.
        communicator: The group.
        artifacts: Artifacts of the job.
        members: Numbers of the members among the job's workers, by rank.
        spans: Records what this rank does.
    """

    def __init__(
        self,
        spec: JobSpec,
        communicator: Communicator,
        artifacts: ReadableArtifacts,
        members: Sequence[int],
        spans: SpanRing | None = None,
    ) -> None:
        self._members = tuple(members)
        self._rows = [1] * len(members)
        self._rate = 1.0
        self._validated: int | None = None  # the epoch whose final weights the model has
        self._timer = StepTimer()
        self.speeds: dict[str, Any] = {}
        self._ring_s = 0.0
        super().__init__(spec, communicator, artifacts, number=self._members[communicator.rank], spans=spans)

    def _make_step(self, manifest: Manifest, state: State) -> GroupStep:
        part = self._part
        self.exchange = GroupExchange(self._communicator, part.layout.size, part.first_update, self.spec.cluster.shards)
        return GroupStep(part.model, manifest, state, self._communicator, self.exchange)

    # ---- instructions

    def _on_begin_epoch(self, begin: ins.BeginEpoch) -> ins.Report:
        if begin.share is not None and begin.share.rows:
            self._rows, self._rate = list(begin.share.rows), begin.share.rate
        self.exchange.weights = None
        return super()._on_begin_epoch(begin)

    def _on_work(self, work: ins.Work) -> ins.Report:
        if work.pull:
            self.exchange.weights = None
        self.exchange.wants_weights = not work.no_weights
        report = super()._on_work(work)
        self.gather_speeds()
        return report

    def _on_evaluate(self, request: ins.Evaluate) -> ins.Report:
        if self._validated != request.epoch:
            assign_values(self._part.model.trainable_variables, self._part.layout.unflatten(self.exchange.pull()))
            self.exchange.weights = None
            self._validated = request.epoch
        return super()._on_evaluate(request)

    def _require_equal_weights(self) -> None:
        """Do nothing: rank 0 sends the same weights to all ranks."""

    # ---- a step

    def _step_on(self, tasks: list[Task], batch: Any, rows: int, total: int) -> Mapping[str, Any]:
        pause = functools.partial(self._timed, rows)
        rate = self._rate
        if self.spec.algorithm.batch_facts.follows_speed and self.spec.train.sized:
            rate *= total / sum(self._rows)  # every sample has equal weight, also in the short last batch of an epoch
        return self.step(batch, weight_of(rows, total), pause, samples=total, rate=rate, task=tasks[0])

    def _split(self, start: int, stop: int) -> tuple[int, int]:
        return member_rows(start, stop, self._rows)[self._communicator.rank]

    def _fed_part(self, tasks: list[Task]) -> tuple[Any, int]:
        """Return this member's rows of a batch that the client fed: the whole batch is the group's."""
        return self._cut(data.decode_batch(tasks[0].data))

    def _whole_part(self, tasks: list[Task], source: BatchSource) -> tuple[Any, int, dict[int, int]]:
        """Return this member's rows of a batch that every member reads: the whole batch is the group's."""
        batch = self._part.batch(source, tasks[0])
        return *self._cut(batch), {tasks[0].task: rows_of(batch)}

    def _cut(self, batch: Any) -> tuple[Any, int]:
        """Return this member's rows of a batch, and their number; None without rows."""
        start, stop = self._split(0, rows_of(batch))
        if start == stop:
            return None, 0
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], batch), stop - start

    def _timed(self, rows: int, seconds: float) -> None:
        """Record the duration of a gradient, with its emulated part."""
        began = time.perf_counter()
        self._emulate(rows, seconds)
        self._timer.add(rows, seconds + time.perf_counter() - began)

    # ---- speeds

    def measure(self) -> None:
        """Time some steps of every member before training, then gather the times; collective.

        Steps with a whole batch and with a part of it separate the fixed cost of a step from the cost of its rows.
        No state changes.
        """
        if self.spec.train.sized:
            untrained = self._untrained.read()
            whole = min(self.spec.fit.batch_size, self.spec.train.samples or 1)
            part = max(1, whole // PART)
            for rows in (whole, part, whole):
                self._probe(rows)
            self._communicator.gather(b"")  # no step is timed while other members compile
            began, self._timer = time.perf_counter(), StepTimer()
            for done in range(1, ROUNDS + 1):
                for rows in (whole, part):
                    self._probe_block(rows)
                if done >= LEAST and time.perf_counter() - began > MEASURE_S:
                    break
            self._untrained.write(untrained)
            self._metrics.reset()
        self._time_ring()
        self.gather_speeds()

    def _time_ring(self) -> None:
        """Time allreduces of a gradient, or of its part where it is large; collective."""
        if self._communicator.size < 2:
            return
        part, seconds = np.zeros(self._ring_size, np.float32), []
        for _ in range(RING_ROUNDS):
            began = time.perf_counter()
            self._communicator.sum_vector(part)
            seconds.append(time.perf_counter() - began)
        self._ring_s = min(seconds)

    @property
    def _ring_size(self) -> int:
        return min(self._part.layout.size, RING_SIZE)

    def _probe(self, rows: int) -> None:
        assert self._part.train is not None
        batch = self._part.train.batch(slice(0, rows))
        began = time.perf_counter()
        self.step.probe(batch)
        seconds = time.perf_counter() - began
        self._timer.add(rows, self._emulated.lengthen(seconds, rows))

    def _probe_block(self, rows: int) -> None:
        before = self._timer.blocks
        while self._timer.blocks == before:
            self._probe(rows)

    def gather_speeds(self) -> None:
        """Gather the latest steps of every member; collective."""
        recent = self._communicator.gather_json(self._timer.summary())
        self.speeds = {str(member): steps for member, steps in zip(self._members, recent, strict=True)}

    def statistics(self, **more: int) -> dict[str, Any]:
        """Return the totals of the group, in the form of one worker's. Only rank 0 calls it."""
        counts, client = self.exchange.counts, self.exchange.client
        assert client is not None
        return {
            **step_totals(self.samples, self.steps, self.compute_s, max(0.0, self.compute_s - counts.exchange_s)),
            "exchange_s": round(counts.exchange_s, 6),
            **push_totals(counts, client),
            **codec_totals(self.spec.algorithm.codec, client.codecs),
            "ranks": self._communicator.size,
            BY_RANK: self._by_rank,
            "recent": self.speeds,
            "ring": {
                "gradient": 4 * self._part.layout.size,
                "bytes": 4 * self._ring_size,
                "seconds": round(self._ring_s, 7),
            },
            **more,
        }
