"""The interface of a mode: it turns a push into an outcome. Modes are used under the store's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from nfdt.core.sharding.records import RecordTree
from nfdt.shard.backups import Backup, BackupStore, WorkerRecord
from nfdt.shard.engine import ReplyWeights
from nfdt.shard.messages import Gradient
from nfdt.shard.versioned_weights import VersionedWeights


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
