"""The asynchronous mode: each gradient is corrected for its delay and applied on arrival."""

from __future__ import annotations

from functools import partial

from nfdt.core.sharding.records import RecordTree
from nfdt.shard.backups import BackupStore
from nfdt.shard.engine import Engine, StepResult
from nfdt.shard.modes.base import ArrivedPush, DelayedPush, PushOutcome, admit
from nfdt.shard.versioned_weights import VersionedWeights


class AsynchronousMode:
    """Mode that makes one update per push; see :class:`~nfdt.shard.modes.base.PushMode` for the methods."""

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
