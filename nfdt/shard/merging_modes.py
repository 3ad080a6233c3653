"""Modes in which several gradients form one update.

In the merged mode (softsync) gradients are corrected on arrival. In synchronous rounds the parts of a round are summed
in their own order, and all of them form one update.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from nfdt.core.errors import ProtocolError
from nfdt.core.sharding.records import RecordTree
from nfdt.shard.backups import BackupStore
from nfdt.shard.engine import GradientAccumulator, MergingEngine, ReplyWeights
from nfdt.shard.messages import Gradient
from nfdt.shard.modes import ArrivedPush, DelayedPush, PushOutcome, VersionedWeights, admit
from nfdt.update_rules.base import RuleState


class MergedMode:
    """Mode that makes one update of ``count`` pushes; see :class:`~nfdt.shard.modes.PushMode` for the methods.

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


class RoundMode:
    """Mode that makes one update per round; see :class:`~nfdt.shard.modes.PushMode` for the methods."""

    in_rounds = True

    def __init__(self, weights: VersionedWeights[MergingEngine], backups: BackupStore) -> None:
        self._weights = weights
        self._open: Round | None = None
        self._rule: RuleState | None = None
        self.closed_round = 0

    def apply(self, arrived: ArrivedPush) -> PushOutcome | None:
        """See ``PushMode``; the sequence number of a part is ignored, as another worker may push the part again."""
        gradient = arrived.gradient
        if gradient.round <= self.closed_round:
            return None
        current = self._open or Round(self._weights.engine, gradient)
        current.check(arrived.worker, gradient)
        self._open = current
        if current.has(gradient.part):
            return None
        current.take(arrived)
        closed = not current.complete or self._close()
        return PushOutcome(arrived.usable and closed, 0, self._reply)

    def flush(self) -> None:
        """Close a round that is not complete."""
        self._close()

    def discard(self) -> None:
        """Drop the parts of the open round."""
        self._open = None

    def records(self) -> RecordTree:
        """Return the number of the newest closed round and the rule's state; parts of the open round are left out.

        The round is pushed again as a whole: the parts have no sequence numbers.
        """
        return {"closed_round": self.closed_round, "rule": self._rule or {}}

    def restore(self, records: RecordTree) -> None:
        """Continue after the newest closed round."""
        self.closed_round = int(records["closed_round"])
        engine = self._weights.engine
        self._rule = engine.restored(records["rule"], engine.new_worker()) if "rule" in records else None

    def _close(self) -> bool:
        """Apply the received parts as one gradient; return False if the update was rejected."""
        current, self._open = self._open, None
        if current is None:
            return True
        self.closed_round = current.number
        current.finish()
        return not current.accumulator.count or self._update(current.accumulator)

    def _update(self, accumulator: GradientAccumulator) -> bool:
        engine = self._weights.engine
        if self._rule is None:
            self._rule = engine.new_worker()
        rule = engine.apply_round(accumulator, self._rule)
        if rule is None:
            return False
        self._rule = rule
        self._weights.advance()
        return True

    def _reply(self) -> ReplyWeights:
        return ReplyWeights(self._weights.snapshot())


class Round:
    """Received parts of one round.

    Args:
        engine: Adds gradients; used under the store's lock.
        first: The part that arrived first.
    """

    def __init__(self, engine: MergingEngine, first: Gradient) -> None:
        self.number = first.round
        self.accumulator: GradientAccumulator = engine.new_accumulator()
        self._engine = engine
        self._parts = first.parts
        self._next = 0
        self._early: dict[int, tuple[Any, float, float, bool] | None] = {}  # None: a dropped part

    @property
    def complete(self) -> bool:
        """Whether every part has arrived."""
        return self._next == self._parts

    def has(self, part: int) -> bool:
        """Return whether this part has arrived."""
        return part < self._next or part in self._early

    def check(self, worker: str, gradient: Gradient) -> None:
        """Raise ProtocolError unless the gradient is a part of this round."""
        if (gradient.round, gradient.parts) != (self.number, self._parts) or gradient.part >= self._parts:
            raise ProtocolError(
                f"Push from worker {worker}: expected a part of round {self.number} with {self._parts} parts. "
                f"Received: part {gradient.part} of {gradient.parts}, round {gradient.round}."
            )

    def take(self, arrived: ArrivedPush) -> None:
        """Add a part; an unusable part counts as received and adds nothing."""
        self._early[arrived.gradient.part] = self._content(arrived) if arrived.usable else None
        while self._next in self._early:
            self._add(self._next)
            self._next += 1

    def finish(self) -> None:
        """Add the parts that arrived early although parts before them are missing."""
        for part in sorted(self._early):
            self._add(part)

    def _content(self, arrived: ArrivedPush) -> tuple[Any, float, float, bool]:
        """Return vector, weight, norm, and whether it is of a sum.

        The vector is borrowed, so a part that must wait is copied.
        """
        gradient = arrived.gradient
        in_order = gradient.part == self._next
        vector = self._engine.tensor(gradient.values if in_order else gradient.values.copy())
        return vector, gradient.weight, arrived.length, gradient.added

    def _add(self, part: int) -> None:
        content = self._early.pop(part)
        if content is not None:
            vector, weight, length, added = content
            self._engine.accumulate_part(self.accumulator, vector, weight, length, added=added)
