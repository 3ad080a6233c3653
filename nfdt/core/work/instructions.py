"""Instructions for workers, reports of workers, and effects of the coordinator: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nfdt.core.work.tasks import Task

LogValue = float | list[Any]

# ---- to a worker: the answer to its call of Next


@dataclass(frozen=True)
class StepShare:
    """Split of a step over the members of a group.

    ``rows`` are the rows of each member in a full step; empty: unchanged. ``rate`` multiplies the learning rate.
    """

    rows: tuple[int, ...] = ()
    rate: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet: call Next again when something has changed."""


@dataclass(frozen=True)
class Work:
    """Train on these tasks; they are all that the worker holds.

    A part of a task of the epoch after the worker's own is computed and not pushed, and its metrics count apart: once
    that epoch begins, the worker gets the whole task, and goes on with the rest of it.
    After ``budget_s`` seconds (0: no limit) the worker begins no further task and reports; the tasks that it has not
    begun are returned. ``overlap`` pushes may be unanswered while it computes. ``untrained`` (safetensors) replaces the
    untrained state first, unless it is empty. ``pull``: train on weights pulled now, not on the reply to the last push.
    ``no_weights``: the replies to these tasks' pushes need no weights, which would be stale. ``look_ahead``: request
    the following work when the last of these tasks begins, with that task in flight. ``apart``: count the metrics of
    each of these tasks apart from those of the epoch, because another worker may count them.
    """

    epoch: int
    tasks: tuple[Task, ...]
    budget_s: float = 0.0
    overlap: int = 0
    untrained: bytes = b""
    pull: bool = False
    no_weights: bool = False
    look_ahead: bool = False
    apart: bool = False


@dataclass(frozen=True)
class BeginEpoch:
    """Reset the metrics; replace the untrained state by ``untrained`` (safetensors) unless that is empty.

    ``order_crc`` is the CRC-32 of the job's first sample order; 0 where NumPy draws none. ``share`` is for groups only.
    ``iteration`` is that over a dataset, which the worker continues or begins. ``ahead``: the client has not permitted
    the epoch yet. Nobody has replaced the weights then, and the worker goes on with those of its last reply.
    """

    epoch: int
    untrained: bytes
    order_crc: int
    share: StepShare | None = None
    iteration: int = 0
    ahead: bool = False


@dataclass(frozen=True)
class CollectState:
    """Send the untrained state and the metrics of the epoch; ``over``: all its tasks are trained.

    A worker with local steps may keep the variables of its optimizers, unless this is the ``last`` epoch.
    """

    epoch: int
    over: bool = False
    last: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Evaluate these rows of the validation data on the current weights and this untrained state.

    ``ahead``: the worker may train the next epoch already; evaluate on the weights that the shards keep, and leave the
    state and metrics of the training as they are.
    """

    epoch: int
    tasks: tuple[Task, ...]
    untrained: bytes
    ahead: bool = False


@dataclass(frozen=True)
class Summarise:
    """Turn merged metric variables into logs.

    ``logs`` are the running logs, the only source of logs that are no metrics. Empty ``metrics``: all workers that
    counted them are lost, use ``logs``. Empty ``validation_metrics``: there was no validation. ``steps`` is the number
    of the epoch's steps. ``callbacks`` is the state of the callbacks of a detached job, which are then called.
    ``ahead``: as of :class:`Evaluate`.
    """

    epoch: int
    metrics: bytes
    validation_metrics: bytes
    logs: Mapping[str, float]
    steps: int = 0
    callbacks: str = ""
    ahead: bool = False


@dataclass(frozen=True)
class Leave:
    """Nothing more to do: push nothing, disconnect."""

    reason: str


@dataclass(frozen=True)
class MoveShards:
    """All shards have been restored from a snapshot: connect to these; what was in flight is lost.

    Nothing that was done with the shards of an older ``incarnation`` counts, and none of it is reported.
    ``shards`` are their addresses, in order. ``shard_token`` is the worker's token for them. ``shard_ca`` is the PEM of
    their certificates' authority; empty: they serve in plain text.
    """

    job_id: str
    incarnation: int
    shards: tuple[str, ...]
    shard_token: str = field(repr=False)
    shard_ca: bytes = field(default=b"", repr=False)


Instruction = Wait | Work | BeginEpoch | CollectState | Evaluate | Summarise | Leave | MoveShards

# ---- from a worker: what it reports with its call of Next


@dataclass(frozen=True)
class EpochState:
    """The answer to :class:`CollectState`.

    ``steps`` are the train steps of this worker since it was given an untrained state, with the epoch or with work.
    """

    epoch: int
    untrained: bytes
    metrics: bytes
    steps: int


@dataclass(frozen=True)
class Evaluated:
    """The answer to :class:`Evaluate`: metric variables over exactly these tasks, by their numbers.

    In a job that predicts, ``metrics`` are the outputs; the server stores them and replaces them by their artifact.
    """

    epoch: int
    tasks: tuple[int, ...]
    metrics: bytes


@dataclass(frozen=True)
class CallbackDecision:
    """Decision of the callbacks of a detached job at the end of an epoch.

    ``state`` is their state from now on. ``learning_rate`` is that of the next epoch; None: unchanged. ``stop``: the
    training ends. ``kept`` are the epochs whose weights they may restore, ``restored`` is the one whose weights are the
    result; None: the current weights are. ``messages`` is what they have printed.
    """

    state: str
    learning_rate: float | None = None
    stop: bool = False
    kept: tuple[int, ...] = ()
    restored: int | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The answer to :class:`Summarise`; an array is a nested list. ``decision``: that of the callbacks, if any."""

    logs: Mapping[str, LogValue]
    val_logs: Mapping[str, LogValue] | None = None
    decision: CallbackDecision | None = None


@dataclass(frozen=True)
class TaskTime:
    """Duration of a task in seconds: its gradient, and the time not overlapped with that (mostly communication).

    ``push_s`` is the time from its push to the reply, hidden or not; 0: not measured.
    """

    compute_s: float
    exchange_s: float = 0.0
    push_s: float = 0.0


@dataclass(frozen=True)
class Supply:
    """Batches of an iteration over a dataset that wait at a worker; ``over``: no more will come."""

    iteration: int
    waiting: int
    over: bool


@dataclass(frozen=True)
class Report:
    """Work since the last call; ``finished`` are task numbers, ``epoch`` is that of ``logs``.

    ``times`` are the durations of finished tasks, by their numbers, where the worker measured them; ``samples`` are
    their samples. ``in_flight`` are tasks that have begun and not finished; the worker accepts more tasks anyway.
    ``early`` is the number of rows that are computed of the worker's first task of the next epoch.
    ``supply`` is that of a worker that makes its batches itself.
    ``metrics`` is the state of the worker's metrics of the epoch; empty: it was not taken. It counts all tasks reported
    so far, and those in ``counted``, which are not finished, but none of those that count apart: ``apart`` has the
    metrics of each finished one of them, by its number.
    ``busy``: the worker still executes its last instruction and advances; all other fields are empty.
    """

    finished: tuple[int, ...] = ()
    epoch: int = 0
    logs: Mapping[str, float] = field(default_factory=dict)
    epoch_state: EpochState | None = None
    evaluated: Evaluated | None = None
    summary: Summary | None = None
    times: Mapping[int, TaskTime] = field(default_factory=dict)
    in_flight: frozenset[int] = frozenset()
    early: int = 0
    busy: bool = False
    samples: Mapping[int, int] = field(default_factory=dict)
    supply: Supply | None = None
    metrics: bytes = b""
    counted: frozenset[int] = frozenset()
    apart: Mapping[int, bytes] = field(default_factory=dict)


# ---- effects of the coordinator, drained by the servicer


@dataclass(frozen=True)
class Emit:
    """Append an event of this kind to the job's events."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class FlushShards:
    """Make every shard apply the gradients that it still holds, then call ``Coordinator.flushed(epoch)``."""

    epoch: int


@dataclass(frozen=True)
class EpochDone:
    """The epoch is complete and its event emitted; the shards do not change until the next one begins.

    ``decision`` is that of the callbacks of a detached job.
    """

    epoch: int
    decision: CallbackDecision | None = None


@dataclass(frozen=True)
class ForgetWorker:
    """The worker is gone: make the shards free its state and refuse its pushes, then call ``Coordinator.forgotten``.

    ``tasks`` are those that it held; the shards may have applied some of them.
    """

    worker: str
    tasks: tuple[int, ...] = ()


@dataclass(frozen=True)
class GiveUp:
    """The worker sent nothing for too long: end its process, it is no longer part of the job."""

    worker: str
    reason: str


@dataclass(frozen=True)
class TrainingDone:
    """All epochs are trained, or training was stopped: compose the result."""


@dataclass(frozen=True)
class Failed:
    """The job cannot continue."""

    reason: str


Effect = Emit | FlushShards | EpochDone | ForgetWorker | GiveUp | TrainingDone | Failed


class EffectHandler(Protocol):
    """Carries out the effects of one job, one method per kind."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event to the job's events."""

    def flush_shards(self, epoch: int) -> None:
        """Make every shard apply the gradients that it holds, then call ``Coordinator.flushed(epoch)``."""

    def forget_worker(self, worker: str, tasks: Sequence[int]) -> None:
        """Free the state of a lost worker on the shards, then call ``Coordinator.forgotten`` with what they applied."""

    def give_up(self, worker: str, reason: str) -> None:
        """End the process of a worker that sent nothing for too long."""

    def end_epoch(self, epoch: int, decision: CallbackDecision | None) -> None:
        """Run the work between two epochs; ``decision`` is that of the callbacks of a detached job."""

    def fail(self, reason: str) -> None:
        """End the job as failed."""

    def finish(self) -> None:
        """Compose the result: all epochs are trained, or training was stopped."""


def carry_out(effect: Effect, handler: EffectHandler) -> None:
    """Call the method of the handler that carries out this effect."""
    match effect:
        case Emit(kind, data):
            handler.emit(kind, data)
        case FlushShards(epoch):
            handler.flush_shards(epoch)
        case ForgetWorker(worker, tasks):
            handler.forget_worker(worker, tasks)
        case GiveUp(worker, reason):
            handler.give_up(worker, reason)
        case EpochDone(epoch, decision):
            handler.end_epoch(epoch, decision)
        case Failed(reason):
            handler.fail(reason)
        case TrainingDone():
            handler.finish()
