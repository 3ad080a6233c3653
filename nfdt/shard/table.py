"""One table of a shard: its weights and the update rule's state, updated row by row, and the log of its changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.table_rows import Rows, Vector
from nfdt.core.sharding import OptimizerSlot
from nfdt.core.sharding.records import RecordTree
from nfdt.shard.optimizer_state import joined, part_of
from nfdt.shard.row_optimizer import RowOptimizer, Slots
from nfdt.update_rules.base import Push, RuleState, UpdateRule, check_state

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Change:
    """Update that made ``version``: ascending row numbers, and the values of these rows before it."""

    version: int
    index: Index
    before: Vector


class RowLog:
    """Newest changes of one table.

    The log replaces a copy of the table per worker and version: the backup of a worker is the table with the changes
    since its version undone.

    Args:
        rows: Number of rows of the table.
        version: Oldest known version.
    """

    def __init__(self, rows: int, version: int = 0) -> None:
        self._place = np.full(rows, -1, np.int32)  # scratch: position of a row in the request
        self.clear(version)

    def clear(self, version: int) -> None:
        """Drop all changes: the table was replaced with ``version``."""
        self._changes: deque[_Change] = deque()
        self._known_since = version
        self._kept = 0

    def add(self, version: int, index: Index, before: Vector) -> None:
        """Add the update that made ``version``: unique rows, and their values before it."""
        self._changes.append(_Change(version, index, before))
        self._kept += index.size

    def keep(self, since: int, most: int) -> None:
        """Drop changes before version ``since``, and the oldest ones while more than ``most`` rows are kept."""
        while self._changes and (self._changes[0].version <= since or self._kept > most):
            oldest = self._changes.popleft()
            self._kept -= oldest.index.size
            self._known_since = oldest.version

    def changed_since(self, version: int) -> Index | None:
        """Return the rows that changed since ``version``, ascending; None if that is no longer known."""
        if version < self._known_since:
            return None
        found = [change.index for change in self._changes if change.version > version]
        if not found:
            return np.zeros(0, np.int32)
        return found[0] if len(found) == 1 else np.unique(np.concatenate(found))

    def undone(self, version: int, index: Index, values: Vector) -> Vector:
        """Return the values of the rows ``index`` at ``version``, given their current ``values``; a new array.

        For a version that is no longer known, return the values of the oldest known version.
        """
        values = values.copy()
        self._place[index] = np.arange(index.size, dtype=np.int32)
        for change in reversed(self._changes):
            if change.version <= version:
                break
            place = self._place[change.index]
            there = place >= 0
            values[place[there]] = change.before[there]
        self._place[index] = -1
        return values


def _zeros_like(x: Any) -> Any:
    return np.zeros(np.shape(x), np.float32)


# NumPy's functions, but zeros are not written, so that untouched rows use no memory.
_ROW_OPS: Any = SimpleNamespace(**{**vars(np), "zeros_like": _zeros_like})


@dataclass(frozen=True)
class PushContext:
    """Circumstances of a push, for its rows.

    Attributes:
        computed_on: Version of the weights that the gradient was computed on.
        staleness: Number of updates that the gradient missed.
        rate: Learning rate of this push.
        updates: Number of updates that the optimizer applied before.
    """

    computed_on: int
    staleness: int
    rate: float
    updates: int


@dataclass(frozen=True)
class MovedRows:
    """Rows before and after a gradient, and the optimizer's slots and the rule's states of them after it."""

    index: Index
    before: Vector
    weights: Vector
    slots: Slots
    state: RuleState
    worker: RuleState

    @property
    def finite(self) -> bool:
        """Whether all values after the gradient are finite."""
        arrays = (self.weights, *self.slots, *self.state.values(), *self.worker.values())
        return all(bool(np.isfinite(array).all()) for array in arrays)


class ShardTable:
    """Table that is updated by an optimizer of rows, with any update rule.

    Rows without a gradient keep their values, their slots and their rule state. Not thread-safe.

    Args:
        weights: Shape ``(rows, width)``, float32; the table takes ownership.
        rule: The update rule; one that owns the optimizer is for gradient descent.
        optimizer: The user's optimizer on rows.
        slots: The optimizer's variables of this table.
    """

    def __init__(
        self, weights: Vector, rule: UpdateRule, optimizer: RowOptimizer, slots: Sequence[OptimizerSlot]
    ) -> None:
        self.weights = weights
        self.log = RowLog(len(weights))
        self._rule = rule
        self._optimizer = optimizer
        self._places = tuple(slots)
        self._slots = tuple(_filled(weights.shape, value) for value in optimizer.initial)
        self._state: RuleState = rule.init_shard(_ROW_OPS, weights)
        self._workers: dict[str, RuleState] = {}

    def moved(self, worker: str, gradient: Rows, context: PushContext) -> MovedRows:
        """Compute the rows after a finite gradient; the table is not changed."""
        index = gradient.index.copy()  # the log keeps it
        before = self.weights[index]
        if worker not in self._workers:
            self._workers[worker] = self._rule.init_worker(_ROW_OPS, self.weights)
        own, state = _rows(self._workers[worker], index), _rows(self._state, index)
        late = context.staleness and self._rule.uses_backup
        backup = self.log.undone(context.computed_on, index, before) if late else before
        push = Push(gradient.values, before, backup, np.float32(context.staleness), np.float32(context.updates))
        with np.errstate(over="ignore", invalid="ignore"):
            made = self._rule.correct(_ROW_OPS, push, state, own)
            rate = np.float32(context.rate) * made.learning_rate_scale
            if self._rule.owns_optimizer:
                moved = self._rule.advance(_ROW_OPS, made.gradient, before, rate, push.updates, made.shard)
                return MovedRows(index, before, moved.weights, (), moved.shard, made.worker)
            held = tuple(slot[index] for slot in self._slots)
            weights, slots = self._optimizer.step(made.gradient, before, held, rate, context.updates)
            state = self._rule.observe(_ROW_OPS, before, weights, made.shard)
        return MovedRows(index, before, weights, slots, state, made.worker)

    def keep_moved(self, worker: str, moved: MovedRows, version: int) -> None:
        """Store the rows as version ``version``."""
        index = moved.index
        self.weights[index] = moved.weights
        for slot, values in zip(self._slots, moved.slots, strict=True):
            slot[index] = values
        self._state = _put(self._state, index, moved.state)
        self._workers[worker] = _put(self._workers[worker], index, moved.worker)
        self.log.add(version, index, moved.before)

    def changed_since(self, version: int) -> Rows | None:
        """Return the current values of the rows that changed since ``version``; None if they are no longer known."""
        index = self.log.changed_since(version)
        return None if index is None else Rows(index, self.weights[index])

    def at(self, version: int, index: Index) -> Vector:
        """Return the values of the rows ``index`` at ``version``, or at the oldest one that is known; a new array."""
        return self.log.undone(version, index, self.weights[index])

    def keep(self, since: int, tables: int) -> None:
        """Drop log entries before version ``since``; older values use at most the memory of ``tables`` copies."""
        self.log.keep(since, tables * len(self.weights))

    def replace(self, weights: Vector, version: int) -> None:
        """Replace the weights from ``version`` on; the rule keeps its state."""
        np.copyto(self.weights, weights)
        self.log.clear(version)

    def read_slots(self) -> dict[int, Vector]:
        """Return copies of the optimizer's variables of the table, by their index in the whole optimizer."""
        return {place.index: slot.copy() for place, slot in zip(self._places, self._slots, strict=True)}

    def load_slots(self, optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Replace the optimizer's variables of the table by their parts of those given of the whole optimizer.

        Raises:
            ShapeMismatch: a variable has another shape.
        """
        for place, slot in zip(self._places, self._slots, strict=True):
            if place.index in optimizer:
                slot[...] = joined([part_of(optimizer[place.index], place)], slot.shape, str(place.index))

    def records(self) -> RecordTree:
        """Return copies of the rule's state of the table and of each worker; see :mod:`nfdt.core.sharding.records`."""
        return {"rule": _copied(self._state), "workers": {name: _copied(own) for name, own in self._workers.items()}}

    def restore(self, records: RecordTree) -> None:
        """Continue from records, before the first push; no worker holds older rows.

        Raises:
            ShapeMismatch: the records belong to another program or rule.
        """
        self._state = _restored(records.get("rule", {}), self._state)
        initial = self._rule.init_worker(_ROW_OPS, self.weights)
        self._workers = {name: _restored(own, initial) for name, own in records.get("workers", {}).items()}

    def forget(self, worker: str) -> None:
        """Free the rule's state of a worker that has left."""
        self._workers.pop(worker, None)


def _filled(shape: tuple[int, ...], value: float) -> Vector:
    """Return an array of a value; zeros are not written."""
    return np.full(shape, value, np.float32) if value else np.zeros(shape, np.float32)


def _rows(state: RuleState, index: Index) -> RuleState:
    return {name: value[index] if np.ndim(value) else value for name, value in state.items()}


def _copied(state: RecordTree) -> RuleState:
    return {name: np.array(value) for name, value in state.items()}


def _restored(received: RecordTree, initial: RuleState) -> RuleState:
    check_state(received, initial)
    return _copied(received)


def _put(state: RuleState, index: Index, rows: RuleState) -> RuleState:
    """Write rows into the state, and replace its scalars."""
    for name, value in rows.items():
        if np.ndim(state[name]):
            state[name][index] = value
    return {name: value if np.ndim(value) else rows[name] for name, value in state.items()}
