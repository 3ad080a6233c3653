"""One table of a shard: its weights and the update rule's state, updated row by row, and the log of its changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.seeded_rows import RowBlocks, SeededRows
from nfdt.core.arrays.table_rows import Rows, Vector, sparse_zeros
from nfdt.core.sharding import OptimizerSlot
from nfdt.core.sharding.records import RecordTree
from nfdt.shard.held_state import HeldRows
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
        self._place = sparse_zeros(rows, np.int32)  # scratch: 1 + position of a row in the request
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
        self._place[index] = np.arange(1, index.size + 1, dtype=np.int32)
        for change in reversed(self._changes):
            if change.version <= version:
                break
            place = self._place[change.index]
            there = place > 0
            values[place[there] - 1] = change.before[there]
        self._place[index] = 0
        return values


def _zeros_like(x: Any) -> Any:
    return sparse_zeros(np.shape(x))


# NumPy's functions, but untouched rows of zeros use no memory.
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


@dataclass(frozen=True)
class HeldTable:
    """State of a table at one moment, in pieces that are copied as they are read.

    Attributes:
        weights: The table.
        slots: The optimizer's variables of the table, by their index in the whole optimizer.
        records: The rule's state of the table and of each worker; see :mod:`nfdt.core.sharding.records`.
        release: To be called once the state has been read.
    """

    weights: Pieces
    slots: Mapping[int, Pieces]
    records: RecordTree
    release: Callable[[], None]


class ShardTable:
    """Table that is updated by an optimizer of rows, with any update rule.

    Rows without a gradient keep their values, their slots and their rule state. Not thread-safe, except that a state
    which is held may be read beside other calls.

    Args:
        weights: Shape ``(rows, width)``, float32; the table takes ownership.
        rule: The update rule; one that owns the optimizer is for gradient descent.
        optimizer: The user's optimizer on rows.
        slots: The optimizer's variables of this table.
        made: Whether shards make the table, so that a state of the script lacks it.
        seeded: Rows of a table whose ``weights`` are not written yet: a block is made when one of its rows is used.
        first: Number of the first row in the whole table, of which this shard may have a part.

    Attributes:
        made: As given.
    """

    def __init__(
        self,
        weights: Vector,
        rule: UpdateRule,
        optimizer: RowOptimizer,
        slots: Sequence[OptimizerSlot],
        *,
        made: bool = False,
        seeded: SeededRows | None = None,
        first: int = 0,
    ) -> None:
        self.weights, self.made = weights, made
        self.log = RowLog(len(weights))
        self._rule = rule
        self._optimizer = optimizer
        self._places = tuple(slots)
        self._seeded, self._first = seeded, first
        self._blocks = RowBlocks(first, len(weights))
        self._unmade = np.full(self._blocks.count, seeded is not None)
        self._slots = tuple(_filled(weights.shape, 0.0 if seeded else value) for value in optimizer.initial)
        self._state: RuleState = rule.init_shard(_ROW_OPS, weights)
        self._workers: dict[str, RuleState] = {}
        self._held: list[HeldRows] = []
        self._lock = threading.Lock()

    def moved(self, worker: str, gradient: Rows, context: PushContext) -> MovedRows:
        """Compute the rows after a finite gradient; the table is not changed."""
        index = gradient.index.copy()  # the log keeps it
        self._make(index)
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
        with self._lock:
            self._keep_held(index)
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
        self._make(index)
        return self.log.undone(version, index, self.weights[index])

    def keep(self, since: int, tables: int) -> None:
        """Drop log entries before version ``since``; older values use at most the memory of ``tables`` copies."""
        self.log.keep(since, tables * len(self.weights))

    def replace(self, weights: Vector, version: int) -> None:
        """Replace the weights from ``version`` on; the rule keeps its state."""
        self._make()
        with self._lock:
            self._keep_held()
            np.copyto(self.weights, weights)
        self.log.clear(version)

    def hold(self, *, records: bool) -> HeldTable:
        """Return the present state; ``records``: with the rule's state."""
        slots = {f"slot/{number}": slot for number, slot in enumerate(self._slots)}
        states = {"rule": self._state, **{f"workers/{name}": own for name, own in self._workers.items()}}
        named = {(group, name): value for group, state in states.items() for name, value in state.items()}
        rowed = {f"{group}/{name}": value for (group, name), value in named.items() if np.ndim(value)}
        with self._lock:
            arrays = {"weights": self.weights, **slots, **(rowed if records else {})}
            held = HeldRows(arrays, self._blocks, self._lock, self._complete)
            self._held.append(held)

        def taken(group: str, state: RuleState) -> RecordTree:
            return {n: held.pieces(f"{group}/{n}") if np.ndim(value) else np.array(value) for n, value in state.items()}

        kept: RecordTree = {}
        if records:
            workers = {name: taken(f"workers/{name}", own) for name, own in self._workers.items()}
            kept = {"rule": taken("rule", self._state), "workers": workers}
        places = dict(zip([place.index for place in self._places], map(held.pieces, slots), strict=True))
        return HeldTable(held.pieces("weights"), places, kept, lambda: self._release(held))

    def _release(self, held: HeldRows) -> None:
        with self._lock:
            if held in self._held:
                self._held.remove(held)

    def _keep_held(self, index: Index | None = None) -> None:
        """Copy what held states need of rows that are about to change; None: of all."""
        for held in self._held:
            held.keep(range(self._blocks.count) if index is None else self._blocks.of(index).tolist())

    def _make(self, index: Index | None = None) -> None:
        """Make the blocks of rows that are used for the first time; None: all."""
        if self._seeded is None:
            return
        blocks = np.arange(self._blocks.count) if index is None else self._blocks.of(index)
        missing = blocks[self._unmade[blocks]]
        if missing.size:
            with self._lock:
                for block in missing.tolist():
                    rows = self._blocks.rows(block)
                    self._seeded.fill(self.weights[rows], self._first + rows.start)
                    for slot, value in zip(self._slots, self._optimizer.initial, strict=True):
                        slot[rows] = value
                self._unmade[missing] = False

    def _complete(self, name: str, piece: Vector, first: int) -> None:
        """Write rows that are not made yet into a copy of the rows of an array from ``first`` on."""
        group, _, number = name.partition("/")
        if self._seeded is None or group not in ("weights", "slot"):
            return
        begin, last = self._blocks.of(np.array([first, first + len(piece) - 1]))[[0, -1]]
        for block in (begin + np.flatnonzero(self._unmade[begin : last + 1])).tolist():
            rows = self._blocks.rows(block)
            part = piece[rows.start - first : rows.stop - first]
            if group == "weights":
                self._seeded.fill(part, self._first + rows.start)
            else:
                part[...] = self._optimizer.initial[int(number)]

    def load_slots(self, optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Replace the optimizer's variables of the table by their parts of those given of the whole optimizer.

        Raises:
            ShapeMismatch: a variable has another shape.
        """
        given = [
            (place, slot) for place, slot in zip(self._places, self._slots, strict=True) if place.index in optimizer
        ]
        if given:
            self._make()
        with self._lock:
            if given:
                self._keep_held()
            for place, slot in given:
                slot[...] = joined([part_of(optimizer[place.index], place)], slot.shape, str(place.index))

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
    """Return an array of a value; untouched zeros use no memory."""
    return np.full(shape, value, np.float32) if value else sparse_zeros(shape)


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
