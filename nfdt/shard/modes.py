"""Modes turn pushes into updates of the weights, and one mode is used by each store, under its lock.

In the asynchronous mode each gradient is corrected for its delay and applied on arrival. The modes in which several
gradients form one update are in :mod:`nfdt.shard.merging_modes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nfdt.core.sharding.records import RecordTree
from nfdt.shard.backups import Backup, BackupStore, WorkerRecord
from nfdt.shard.engine import Engine, ReplyWeights, StepResult, Vector
from nfdt.shard.messages import Gradient

E = TypeVar("E", bound=Engine)


class VersionedWeights(Generic[E]):
    """Version counter of one shard, and one snapshot that all replies of a version share.

    Args:
        engine: Weights, optimizer and rule.
        notify: Called for every new version.

    Attributes:
        version: Number of updates applied.
    """

    def __init__(self, engine: E, notify: Callable[[], None]) -> None:
        self.engine = engine
        self._notify = notify
        self.version = 0
        self._snapshot: Vector = None

    def snapshot(self) -> Vector:
        """Return the weights of this version; all workers that request them share one copy."""
        if self._snapshot is None:
            self._snapshot = self.engine.weights()
        return self._snapshot

    def advance(self) -> None:
        """Count an update that the engine has applied."""
        self.version += 1
        self._snapshot = None
        self._notify()


class ArrivedPush(NamedTuple):
    """Push as its mode receives it.

    Attributes:
        worker: Name of the worker.
        gradient: Gradient, of the shard's size.
        length: Euclidean norm of the gradient.
        usable: Whether the gradient may be applied; False counts the push and drops its gradient.
    """

    worker: str
    gradient: Gradient
    length: float
    usable: bool


class PushOutcome(NamedTuple):
    """Effect of a push.

    Attributes:
        applied: False for a gradient that was dropped.
        staleness: Number of updates that the gradient missed.
        reply: Makes the weights for the worker; called only if weights were requested.
        finish: Does the work of the update without the store's lock, after ``reply``; None if it is done.
    """

    applied: bool
    staleness: int
    reply: Callable[[], ReplyWeights]
    finish: Callable[[], None] | None = None


class PushMode(Protocol):
    """Mode that turns the pushes of one shard into updates."""

    @property
    def in_rounds(self) -> bool:
        """Whether every push is a part of a synchronous round; otherwise none is."""
        ...

    @property
    def closed_round(self) -> int:
        """Newest synchronous round that is closed; 0 before the first."""
        ...

    def apply(self, arrived: ArrivedPush) -> PushOutcome | None:
        """Apply a push, or keep it for an update with others; return None for a duplicate.

        Raises:
            ProtocolError: the worker never pulled, or parts of a round contradict each other.
        """
        ...

    def flush(self) -> None:
        """Apply the gradients that wait for others."""
        ...

    def discard(self) -> None:
        """Drop the gradients that wait for others."""
        ...

    def records(self) -> RecordTree:
        """Return the state of the mode; see :mod:`nfdt.core.sharding.records`. Nothing is copied."""
        ...

    def restore(self, records: RecordTree) -> None:
        """Continue from records, before the first push."""
        ...


class ModeFactory(Protocol):
    """Factory of the mode of a store."""

    def __call__(self, weights: VersionedWeights[Any], backups: BackupStore) -> PushMode:
        """Return a mode that updates ``weights`` and reads the workers' backups."""
        ...


class DelayedPush(NamedTuple):
    """Asynchronous push and its delay.

    Attributes:
        record: Record of the worker.
        backup: Weights that the gradient was computed on.
        staleness: Updates applied since then.
        anchor: Anchor of the reply; None if replies have none.
    """

    record: WorkerRecord
    backup: Backup
    staleness: int
    anchor: Any


def admit(arrived: ArrivedPush, weights: VersionedWeights[Any], backups: BackupStore) -> DelayedPush | None:
    """Look up the backup of an asynchronous push and count it; None for a duplicate, or if its tasks are applied.

    Raises:
        ProtocolError: the worker never pulled, or the backup is no longer kept.
    """
    gradient, record = arrived.gradient, backups.known(arrived.worker)
    if gradient.sequence <= record.sequence:
        return None
    backup = record.backups.used(arrived.worker, gradient.computed_on)
    record.sequence = gradient.sequence
    if not backups.count_tasks(gradient.tasks):
        return None
    return DelayedPush(record, backup, weights.version - backup.version, backups.anchor(weights.snapshot))


class AsynchronousMode:
    """Mode that makes one update per push; see :class:`~nfdt.shard.modes.PushMode` for the methods."""

    in_rounds = False
    closed_round = 0

    def __init__(self, weights: VersionedWeights[Engine], backups: BackupStore) -> None:
        self._weights, self._backups = weights, backups

    def apply(self, arrived: ArrivedPush) -> PushOutcome | None:
        """See ``PushMode``."""
        push = admit(arrived, self._weights, self._backups)
        if push is None:
            return None
        result = self._step(arrived, push) if arrived.usable else None
        if result is None:
            reply = partial(self._weights.engine.reply, push.staleness, anchor=push.anchor)
            return PushOutcome(False, push.staleness, reply)
        push.record.rule = result.worker
        self._weights.advance()
        return PushOutcome(True, push.staleness, lambda: result.reply, result.finish)

    def flush(self) -> None:
        """Return at once: no gradient waits."""

    def discard(self) -> None:
        """Return at once: no gradient waits."""

    def records(self) -> RecordTree:
        """Return no records: the mode has no state."""
        return {}

    def restore(self, records: RecordTree) -> None:
        """Do nothing."""

    def _step(self, arrived: ArrivedPush, push: DelayedPush) -> StepResult | None:
        engine, gradient = self._weights.engine, arrived.gradient
        args = (engine.tensor(gradient.values), push.backup.weights, push.staleness, push.record.rule)
        return engine.step(*args, length=arrived.length, rate=gradient.rate, anchor=push.anchor)
