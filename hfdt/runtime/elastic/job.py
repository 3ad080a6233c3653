"""Job whose ranks may join and leave: its state is copied after each instruction, and restored after a loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfdt.runtime.artifacts import ReadableArtifacts
from hfdt.runtime.batch_split import cut_rows
from hfdt.runtime.communicator import Communicator, join_parts, split_parts
from hfdt.runtime.job import RingJob
from nfdt.core.arrays.layout import Array
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import to_report, to_request
from nfdt.core.work.spans import SpanRing
from nfdt.core.work.tasks import Task
from nfdt.model.program.state import State, dump_state, load_state
from nfdt.model.training import merge

NUMBER_BYTES = 8  # of a rank's number, before its metrics


@dataclass(frozen=True)
class Snapshot:
    """Committed state of a job.

    Attributes:
        commit: Number of the commit.
        state: Weights and optimizer variables, equal on all ranks.
        untrained: This rank's untrained variables.
        base: Untrained variables at the beginning of the epoch, equal on all ranks.
        counters: ``epoch``, ``steps`` and ``samples`` of the job, equal on all ranks.
        own: ``epoch_samples`` and ``epoch_steps`` of this rank.
        metrics: Metric variables (encoded) of every rank, by its number.
        orphans: Metric variables (encoded) of ranks lost in this epoch.
        answer: Report of the work up to this commit; a new leader sends it again, as it may not have been sent.
    """

    commit: int
    state: State
    untrained: list[Array]
    base: list[Array]
    counters: Mapping[str, int]
    own: Mapping[str, int]
    metrics: Mapping[int, bytes]
    orphans: tuple[bytes, ...] = ()
    answer: bytes = field(default=b"", repr=False)

    def encode(self) -> bytes:
        """Return the snapshot as bytes, for ranks with another or no snapshot; ``own`` is not included."""
        header = {"commit": self.commit, "counters": dict(self.counters), "numbers": list(self.metrics)}
        state = dump_state(self.state.weights, self.state.optimizer, dict(enumerate(self.untrained)))
        common = (json.dumps(header).encode(), state, merge.encode_arrays(self.base), self.answer)
        return join_parts(*common, *self.metrics.values(), *self.orphans)

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Decode the result of :meth:`encode`; ``untrained`` are the sender's."""
        common, state_data, base, answer, *metrics = split_parts(data)
        header: dict[str, Any] = json.loads(common)
        state, numbers = load_state(state_data), header["numbers"]
        return cls(
            commit=header["commit"],
            state=State(state.weights, state.optimizer),
            untrained=[state.untrained[i] for i in sorted(state.untrained)],
            base=merge.decode_arrays(base),
            counters=header["counters"],
            own={},
            metrics=dict(zip(numbers, metrics, strict=False)),
            orphans=tuple(metrics[len(numbers) :]),
            answer=answer,
        )


class ElasticJob(RingJob):
    """Job on one rank of an elastic ring. The ranks may have changed between two calls.

    Args:
        spec: The job, with the batch of one rank in ``fit.batch_size``.
        communicator: The ranks.
        artifacts: Artifacts of the job.
        number: Number of this rank in the ring.
        spans: Records what this rank does; None: nothing is recorded.

    Attributes:
        snapshot: Last commit.
        attempted: Highest step that has begun, including steps on lost ranks.
    """

    def __init__(
        self,
        spec: JobSpec,
        communicator: Communicator,
        artifacts: ReadableArtifacts,
        *,
        number: int,
        spans: SpanRing | None = None,
    ) -> None:
        super().__init__(spec, communicator, artifacts, number=number, spans=spans)
        self._epoch = -1
        self._orphans: tuple[bytes, ...] = ()
        self.attempted = 0
        self.snapshot: Snapshot | None = None

    # ---- differences while instructions are executed

    def _on_begin_epoch(self, begin: ins.BeginEpoch) -> ins.Report:
        if begin.epoch == self._epoch:
            return ins.Report()  # a new leader receives the instruction that the lost one had executed
        report = super()._on_begin_epoch(begin)
        self._epoch, self._orphans = begin.epoch, ()
        return report

    def _steps_of(self, work: ins.Work) -> list[list[Task]]:
        """Return steps of at most one batch per rank; larger steps after a loss of ranks are split."""
        steps = super()._steps_of(work)
        size, most = self._communicator.size, self._communicator.size * self.spec.fit.batch_size
        if not self.spec.train.sized:
            return [step[at : at + size] for step in steps for at in range(0, len(step), size)]
        if all(task.stop - task.start <= most for task in work.tasks):
            return steps
        cuts = cut_rows([(task.pass_index, task.start, task.stop) for task in work.tasks], most)
        return [[Task(0, start, stop, number)] for number, start, stop in cuts]

    def _train_on(self, tasks: list[Task], part: tuple[Any, int]) -> dict[int, int]:
        counted = super()._train_on(tasks, part)
        self.attempted = max(self.attempted, self.steps)
        return counted

    @property
    def _new_step(self) -> int:
        return self.steps + 1 if self.steps + 1 > self.attempted else 0

    def _epoch_metrics(self) -> list[bytes]:
        return [*super()._epoch_metrics(), *self._orphans]

    # ---- commits

    def commit(self, report: ins.Report) -> None:
        """Copy the state; when this returns, every rank has its copy. Collective."""
        number = self._number.to_bytes(NUMBER_BYTES, "little")
        found = self._communicator.gather(number + self._metrics.collect())
        before = self.snapshot.commit if self.snapshot else -1
        self.snapshot = Snapshot(
            commit=before + 1,
            state=self.step.read(),
            untrained=[array.copy() for array in self._untrained.read()],
            base=self._base,
            counters={"epoch": self._epoch, "steps": self.steps, "samples": self.samples},
            own={"epoch_samples": self._epoch_samples, "epoch_steps": self._epoch_steps},
            metrics={int.from_bytes(data[:NUMBER_BYTES], "little"): data[NUMBER_BYTES:] for data in found},
            orphans=self._orphans,
            answer=to_request(report).SerializeToString(),
        )
        self._communicator.gather(b"")  # no report before every rank has its copy

    def resume(self, snapshot: Snapshot, present: Sequence[int]) -> None:
        """Restore a commit of this rank or of the leader.

        Args:
            snapshot: The commit.
            present: Numbers of the present ranks; the metrics of lost ranks are kept unchanged.
        """
        own = self.snapshot or snapshot  # a new rank has the leader's untrained variables, and no samples of its own
        self.step.load(snapshot.state)
        self.step.shared.reset()
        self._untrained.write(own.untrained)
        self._base = snapshot.base
        self._epoch = snapshot.counters["epoch"]
        self.steps, self.samples = snapshot.counters["steps"], snapshot.counters["samples"]
        self._epoch_samples, self._epoch_steps = own.own.get("epoch_samples", 0), own.own.get("epoch_steps", 0)
        self._metrics.load(snapshot.metrics.get(self._number, b""))
        lost = [snapshot.metrics[number] for number in sorted(set(snapshot.metrics) - set(present))]
        self._orphans = (*snapshot.orphans, *lost)
        self.snapshot = snapshot

    @property
    def pending(self) -> ins.Report:
        """Report of the last commit."""
        return to_report(pb.NextRequest.FromString(self.snapshot.answer)) if self.snapshot else ins.Report()
