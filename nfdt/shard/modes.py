"""Modes turn pushes into updates of the weights, and count versions; each store has one mode, used under its lock.

In the asynchronous mode each gradient is corrected for its delay and applied on arrival. In the merged mode (softsync)
gradients are corrected on arrival, and several form one update. In synchronous rounds the parts of a round are summed
in their own order, and all of them form one update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from nfdt.core.errors import ProtocolError
from nfdt.core.sharding.records import RecordTree
from nfdt.shard.backups import BackupStore, WorkerRecord
from nfdt.shard.engine import Engine, EngineReply, GradientAccumulator, MergingEngine, Vector
from nfdt.shard.messages import Gradient
from nfdt.update_rules.base import RuleState

E = TypeVar("E", bound=Engine)


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
    reply: Callable[[], EngineReply]
    finish: Callable[[], None] | None = None


class PushMode(Generic[E]):
    """Base of all modes: the version counter, and one snapshot that all replies of a version share.

    Args:
        engine: Weights, optimizer and rule.
        backups: Weights that the workers hold.
        notify: Called for every new version.

    Attributes:
        in_rounds: Whether every push is a part of a synchronous round; otherwise none is.
        closed_round: Newest synchronous round that is closed; 0 before the first.
        version: Number of updates applied.
    """

    in_rounds = False
    closed_round = 0

    def __init__(self, engine: E, backups: BackupStore, notify: Callable[[], None]) -> None:
        self._engine, self._backups, self._notify = engine, backups, notify
        self.version = 0
        self._snapshot: Vector = None

    def snapshot(self) -> Vector:
        """Return the weights of this version; all workers that request them share one copy."""
        if self._snapshot is None:
            self._snapshot = self._engine.weights()
        return self._snapshot

    def advance(self) -> None:
        """Count an update that the engine has applied."""
        self.version += 1
        self._snapshot = None
        self._notify()

    def apply(self, worker: str, gradient: Gradient, length: float, usable: bool) -> PushOutcome | None:
        """Apply a push, or keep it for an update with others; return None for a duplicate.

        Args:
            worker: Name of the worker.
            gradient: Gradient, of the shard's size.
            length: Euclidean norm of the gradient.
            usable: Whether the gradient may be applied; False counts the push and drops its gradient.

        Raises:
            ProtocolError: the worker never pulled, or parts of a round contradict each other.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Apply the gradients that wait for others; here none waits."""

    def discard(self) -> None:
        """Drop the gradients that wait for others; here none waits."""

    def records(self) -> RecordTree:
        """Return the state of the mode; see :mod:`nfdt.core.sharding.records`. Nothing is copied."""
        return {}

    def restore(self, records: RecordTree) -> None:
        """Continue from records, before the first push."""


ModeFactory = Callable[[Any, BackupStore, Callable[[], None]], PushMode[Any]]
"""Makes the mode of a store from the arguments of :class:`PushMode`."""


class AsynchronousMode(PushMode[E]):
    """Mode that makes one update per push."""

    def apply(self, worker: str, gradient: Gradient, length: float, usable: bool) -> PushOutcome | None:
        """Look up the weights that the gradient was computed on, count the push, and use the gradient."""
        record = self._backups.known(worker)
        if gradient.sequence <= record.sequence:  # sent again after its stream broke
            return None
        backup = record.used(worker, gradient.computed_on)
        record.sequence = gradient.sequence
        # The tasks of a lost worker may be leased again although it has pushed them.
        if not self._backups.count_tasks(gradient.tasks):
            return None
        staleness, anchor = self.version - backup.version, self._backups.anchor(self.snapshot)
        dropped = PushOutcome(False, staleness, partial(self._engine.reply, staleness, anchor=anchor))
        return self._use(gradient, length, record, backup.weights, anchor, dropped) if usable else dropped

    def _use(
        self, gradient: Gradient, length: float, record: WorkerRecord, backup: Any, anchor: Any, dropped: PushOutcome
    ) -> PushOutcome:
        """Use a gradient that was computed on ``backup``; return ``dropped`` if the engine rejects it."""
        args = (self._engine.tensor(gradient.values), backup, dropped.staleness, record.rule)
        result = self._engine.step(*args, length=length, rate=gradient.rate, anchor=anchor)
        if result is None:
            return dropped
        record.rule = result.worker
        self.advance()
        return PushOutcome(True, dropped.staleness, lambda: result, result.finish)


class MergedMode(AsynchronousMode[MergingEngine]):
    """Mode that makes one update of ``count`` pushes.

    Args:
        *shard: Arguments of :class:`PushMode`.
        count: Number of gradients per update.
    """

    def __init__(self, *shard: Any, count: int) -> None:
        super().__init__(*shard)
        self._count = count
        self._accumulator: GradientAccumulator | None = None

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
            counts, empty = dict(records), self._engine.new_accumulator()
            sums = {name: counts.pop(name) for name in ("total", "weight")}
            sums = self._engine.restored(sums, {"total": empty.total, "weight": empty.weight})
            self._accumulator = replace(empty, **sums, **{name: count.item() for name, count in counts.items()})

    def _use(
        self, gradient: Gradient, length: float, record: WorkerRecord, backup: Any, anchor: Any, dropped: PushOutcome
    ) -> PushOutcome:
        """Add a gradient, and apply the update if it is complete."""
        accumulator = self._accumulator = self._accumulator or self._engine.new_accumulator()
        args = (self._engine.tensor(gradient.values), backup, dropped.staleness, record.rule, gradient.weight)
        record.rule = self._engine.accumulate(accumulator, *args, length=length, added=gradient.added)
        return dropped._replace(applied=accumulator.count < self._count or self._finish())

    def _finish(self) -> bool:
        """Apply the accumulated gradients, if any; return False if they were rejected."""
        accumulator, self._accumulator = self._accumulator, None
        if accumulator is None:
            return True
        applied = self._engine.apply(accumulator)
        if applied:
            self.advance()
        return applied


class RoundMode(PushMode[MergingEngine]):
    """Mode that makes one update per round."""

    in_rounds = True

    def __init__(self, *shard: Any) -> None:
        super().__init__(*shard)
        self._open: Round | None = None
        self._rule: RuleState | None = None

    def apply(self, worker: str, gradient: Gradient, length: float, usable: bool) -> PushOutcome | None:
        """Add a part; its sequence number is ignored, as another worker may push the part again."""
        if gradient.round <= self.closed_round:
            return None
        current = self._open or Round(self._engine, gradient)
        current.check(worker, gradient)
        self._open = current  # only after the check: a part that is refused opens no round
        if current.has(gradient.part):
            return None
        current.add(gradient, length, usable)
        closed = not current.complete or self._close()
        return PushOutcome(usable and closed, 0, lambda: EngineReply(self.snapshot()))

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
        if "rule" in records:
            self._rule = self._engine.restored(records["rule"], self._engine.new_worker())

    def _close(self) -> bool:
        """Apply the received parts as one gradient; return False if the update was rejected."""
        current, self._open = self._open, None
        if current is None:
            return True
        self.closed_round = current.number  # also of a rejected round, which must not be pushed again
        current.add_early()
        if not current.accumulator.count:
            return True
        if self._rule is None:
            self._rule = self._engine.new_worker()
        rule = self._engine.apply_round(current.accumulator, self._rule)
        if rule is None:
            return False
        self._rule = rule
        self.advance()
        return True


class Round:
    """Received parts of one round, which are added in their own order, so that their sum is always the same.

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
        self._early: dict[int, Callable[[], None] | None] = {}  # adds a part; None: it was dropped

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

    def add(self, gradient: Gradient, length: float, usable: bool) -> None:
        """Add a part; an unusable part counts as received and adds nothing."""
        self._early[gradient.part] = self._addition(gradient, length) if usable else None
        while self._next in self._early:
            self._add(self._next)
            self._next += 1

    def add_early(self) -> None:
        """Add the parts that arrived early although parts before them are missing."""
        for part in sorted(self._early):
            self._add(part)

    def _addition(self, gradient: Gradient, length: float) -> Callable[[], None]:
        # The values are borrowed until the push returns, so a part that must wait is copied.
        values = gradient.values if gradient.part == self._next else gradient.values.copy()
        args = (self.accumulator, self._engine.tensor(values), gradient.weight, length)
        return partial(self._engine.accumulate_part, *args, added=gradient.added)

    def _add(self, part: int) -> None:
        addition = self._early.pop(part)
        if addition is not None:
            addition()
