"""The merged mode (softsync): gradients are corrected on arrival, and several of them form one update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from nfdt.core.sharding.records import RecordTree
from nfdt.shard.backups import BackupStore
from nfdt.shard.engine import GradientAccumulator, MergingEngine
from nfdt.shard.modes.base import ArrivedPush, DelayedPush, PushOutcome, admit
from nfdt.shard.versioned_weights import VersionedWeights


class MergedMode:
    """Mode that makes one update of ``count`` pushes; see :class:`~nfdt.shard.modes.base.PushMode` for the methods.

    Args:
        weights: Weights of the shard.
        backups: Backups of its workers.
        count: Number of gradients per update.
    """

    in_rounds = False
    closed_round = 0

    def __init__(self, weights: VersionedWeights[MergingEngine], backups: BackupStore, *, count: int) -> None:
        self._weights, self._backups = weights, backups
        self._count = count
        self._accumulator: GradientAccumulator | None = None

    def apply(self, arrived: ArrivedPush) -> PushOutcome | None:
        """See ``PushMode``."""
        push = admit(arrived, self._weights, self._backups)
        if push is None:
            return None
        applied = arrived.usable and self._merge(arrived, push)
        reply = partial(self._weights.engine.reply, push.staleness, anchor=push.anchor)
        return PushOutcome(applied, push.staleness, reply)

    def flush(self) -> None:
        """Apply an incomplete update."""
        self._finish()

    def discard(self) -> None:
        """Drop an incomplete update."""
        self._accumulator = None

    def records(self) -> RecordTree:
        """Return the accumulated gradients, as their sequence numbers are counted already."""
        return dict(vars(self._accumulator)) if self._accumulator else {}

    def restore(self, records: RecordTree) -> None:
        """Continue with the accumulated gradients, if there are any."""
        if records:
            engine, counts = self._weights.engine, dict(records)
            empty = engine.new_accumulator()
            sums = {name: counts.pop(name) for name in ("total", "weight")}
            sums = engine.restored(sums, {"total": empty.total, "weight": empty.weight})
            self._accumulator = replace(empty, **sums, **{name: count.item() for name, count in counts.items()})

    def _merge(self, arrived: ArrivedPush, push: DelayedPush) -> bool:
        """Add a gradient, and apply the update if it is complete; return False if the update was rejected."""
        engine, gradient = self._weights.engine, arrived.gradient
        accumulator = self._accumulator = self._accumulator or engine.new_accumulator()
        args = (engine.tensor(gradient.values), push.backup.weights, push.staleness, push.record.rule, gradient.weight)
        push.record.rule = engine.accumulate(accumulator, *args, length=arrived.length, added=gradient.added)
        return accumulator.count < self._count or self._finish()

    def _finish(self) -> bool:
        """Apply the accumulated gradients, if any; return False if they were rejected."""
        accumulator, self._accumulator = self._accumulator, None
        if accumulator is None:
            return True
        applied = self._weights.engine.apply(accumulator)
        if applied:
            self._weights.advance()
        return applied
