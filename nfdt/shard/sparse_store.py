"""Shard with tables: a :class:`~nfdt.shard.store.ShardStore` for everything dense, and the tables by rows.

Both change under the lock of the dense store: one push, one version. The dense store detects duplicates and computes
staleness; the tables follow it. A gradient whose rows are not finite, or would make the table non-finite, is dropped
as a whole. A worker that names the reply it holds gets the dense weights and the rows that changed since. Any other
worker gets all weights as one flat vector, and may push a flat gradient.

Where workers do not hold the tables, replies have the dense weights alone. A worker then looks up the rows of a batch,
at the version of a reply that it holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.codecs.sparse import ROWS
from nfdt.core.arrays.safetensors_io import ArrayEntry, Pieces
from nfdt.core.arrays.table_rows import Payload, Rows, RowVector, TableLayout
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.core.sharding.records import RecordTree
from nfdt.shard.engine import Engine
from nfdt.shard.held_state import HeldState, StateHolder, whole
from nfdt.shard.messages import DeltaRequest, Gradient, Reply, Vector
from nfdt.shard.store import PULL_TIMEOUT_S, ShardStore, Starter
from nfdt.shard.table import MovedRows, PushContext, ShardTable
from nfdt.transport.base import WeightDelta


class SparseStore(StateHolder):
    """Thread-safe store of one shard with tables; see :class:`~nfdt.shard.store.ShardStore` for its methods.

    Args:
        dense: Store of the weights outside the tables, with one element if there are none. Its mode is asynchronous or
            rounds; tables cannot be merged.
        engine: Engine of the dense store; read for the learning rate.
        tables: Tables in the layout's order.
        layout: Layout of this shard.
        looked_up: Whether workers look rows up, so that replies have no tables.
    """

    def __init__(
        self,
        dense: ShardStore,
        engine: Engine,
        tables: Sequence[ShardTable],
        layout: TableLayout,
        *,
        looked_up: bool = False,
    ) -> None:
        self.overlap = dense.overlap
        self._dense = dense
        self._engine = engine
        self._tables = list(tables)
        self._layout = layout
        self._looked_up = looked_up
        self._changed = dense.lock
        self._round = RowRound()
        self._waited_s = self._busy_s = 0.0
        self._backup_versions: dict[str, dict[int, int]] = {}  # worker -> sequence of a request -> version of its reply

    @property
    def size(self) -> int:
        """Number of elements, including the tables."""
        return self._layout.size

    @property
    def reply_size(self) -> int:
        """Number of elements of a reply with all weights."""
        return self._layout.dense_size if self._looked_up else self.size

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self._dense.version

    @property
    def closed_round(self) -> int:
        """Newest synchronous round that is closed; 0 before the first."""
        return self._dense.closed_round

    def pull(
        self,
        worker: str,
        *,
        sequence: int = 0,
        min_version: int = 0,
        timeout_s: float = PULL_TIMEOUT_S,
        delta: DeltaRequest | None = None,
    ) -> Reply:
        """Return the current weights, or the changes in them; see :meth:`ShardStore.pull`."""
        with self._changed:
            reply = self._dense.pull(worker, sequence=sequence, min_version=min_version, timeout_s=timeout_s)
            return self._answer(worker, sequence, reply, delta)

    def lookup(self, worker: str, payload: Payload, computed_on: int) -> Reply:
        """Return rows as the worker's reply ``computed_on`` would have had them, flat, table after table.

        Args:
            worker: Name of the worker.
            payload: Row numbers; see :func:`nfdt.core.arrays.table_rows.encode_numbers`.
            computed_on: Sequence of the reply; 0 for the newest.

        Raises:
            ShapeMismatch: the row numbers belong to another model.
            ProtocolError: the worker never pulled, or the numbers are out of range.
        """
        numbers = self._layout.decode_numbers(payload)
        with self._changed:
            if worker not in self._backup_versions:
                raise ProtocolError(f"Lookup by {worker}: expected a pull before. Received: none.")
            version = self._computed_on(worker, computed_on)
            rows = [table.at(version, index).reshape(-1) for table, index in zip(self._tables, numbers, strict=True)]
            return Reply(version, np.concatenate([np.zeros(0, np.float32), *rows]))

    def push(
        self,
        worker: str,
        gradient: Gradient,
        *,
        want_weights: bool = True,
        delta: DeltaRequest | None = None,
        start: Starter | None = None,
    ) -> Reply:
        """Apply a gradient at most once; its values are a flat vector, or the bytes of rows.

        ``start`` is not used: the tables follow the dense weights under their lock.

        Raises:
            ShapeMismatch: the gradient belongs to another model.
            ProtocolError: the worker never pulled, or parts of a round contradict each other.
        """
        vector, alone = self._received(worker, gradient.values), not gradient.round
        asked_at = time.perf_counter()
        with self._changed:
            began_at = time.perf_counter()
            before, updates, rate = self.version, self._engine.updates, self._engine.learning_rate
            moved = self._moved(worker, gradient, vector.rows, rate, updates) if alone and vector.finite else []
            finite = vector.finite and all(table.finite for table in moved)
            dense = replace(gradient, values=self._at_least_one(vector.dense), length=None)
            # The dense store counts the push even if its rows are dropped, so that both have the same versions.
            reply = self._dense.push(worker, dense, want_weights=want_weights, drop=not finite)
            if alone and reply.applied:
                self._keep(worker, moved)
            elif not alone and reply.applied:
                self._round.add(gradient, vector)
            if not alone and self.version > before:
                self._close_round(rate, updates)
            reply = self._answer(worker, gradient.sequence, reply, delta) if want_weights else reply
            self._waited_s += began_at - asked_at
            self._busy_s += time.perf_counter() - began_at
            return reply

    def flush(self) -> int:
        """Apply the parts of an incomplete round; return the version."""
        with self._changed:
            before, updates, rate = self.version, self._engine.updates, self._engine.learning_rate
            if self._dense.flush() > before:
                self._close_round(rate, updates)
            return self.version

    def forget(self, worker: str, tasks: Iterable[int] = ()) -> list[int]:
        """Free the records of a worker that has left, and refuse its requests; see :meth:`ShardStore.forget`."""
        with self._changed:
            self._backup_versions.pop(worker, None)
            for table in self._tables:
                table.forget(worker)
            return self._dense.forget(worker, tasks)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate from the next update on."""
        with self._changed:
            self._dense.set_learning_rate(value)

    def statistics(self) -> dict[str, Any]:
        """Return counts of this shard and per worker, ready for JSON."""
        with self._changed:
            return {**self._dense.statistics(), "size": self.size, "busy_s": self._busy_s, "wait_s": self._waited_s}

    def hold(self, *, records: bool = False, weights_only: bool = False) -> HeldState:
        """Return the state at one moment; see :meth:`ShardStore.hold`."""
        with self._changed:
            held = self._dense.hold(records=records, weights_only=weights_only)
            tables = [table.hold(records=records) for table in self._tables]
            optimizer, others = dict(held.optimizer), held.records
            for table in () if weights_only else tables:
                optimizer.update(table.slots)
            if records:
                others = {**others, "tables": {str(index): table.records for index, table in enumerate(tables)}}
            pieces = self._layout.pieces(self._own(whole(held.weights)), [table.weights.arrays for table in tables])
            weights = Pieces(ArrayEntry(np.dtype("<f4"), (self.size,)), pieces)

        def release() -> None:
            held.release()
            for table in tables:
                table.release()

        return HeldState(weights, dict(sorted(optimizer.items())), others, release)

    def restore(self, records: RecordTree) -> None:
        """Continue from the records of a snapshot; see :meth:`ShardStore.restore`."""
        with self._changed:
            self._dense.restore(records)
            own = records.get("tables", {})
            for index, table in enumerate(self._tables):
                table.restore(own.get(str(index), {}))

    def write(self, weights: Vector, optimizer: dict[int, npt.NDArray[Any]]) -> int:
        """Replace the weights and, where given, the optimizer variables; return the new version.

        Tables that shards make stay as they are if the weights lack them.

        Raises:
            ShapeMismatch: the weights have another size.
        """
        layout, tables = self._layout, self._tables
        if weights.size != self.size:
            made = [index for index, table in enumerate(tables) if table.made]
            layout, tables = layout.without(made), [table for table in tables if not table.made]
        if weights.shape != (layout.size,):
            raise ShapeMismatch(f"Write: expected {self.size} weights. Received: shape {weights.shape}.")
        with self._changed:
            version = self._dense.write(self._at_least_one(layout.dense(weights)), optimizer)
            for table, values in zip(tables, layout.views(weights), strict=True):
                table.replace(values, version)
                table.load_slots(optimizer)
            return version

    def _received(self, worker: str, values: npt.NDArray[Any]) -> RowVector:
        if values.dtype == np.uint8:
            return self._layout.decode(values)
        if values.shape != (self.size,):
            raise ShapeMismatch(
                f"Push from worker {worker}: expected {self.size} float32 elements. Received: shape {values.shape}, "
                f"{values.dtype}. The worker runs another model; restart it."
            )
        return self._layout.touched(values)

    # -- under the lock

    def _moved(
        self, worker: str, gradient: Gradient, rows: Sequence[Rows], rate: float, updates: int
    ) -> list[MovedRows]:
        """Compute the rows after a push; none for an unknown worker, whose push the dense store rejects."""
        if worker not in self._backup_versions:
            return []
        computed_on = self._computed_on(worker, gradient.computed_on)
        context = PushContext(computed_on, self.version - computed_on, rate * gradient.rate, updates)
        return [table.moved(worker, own, context) for table, own in zip(self._tables, rows, strict=True)]

    def _keep(self, worker: str, moved: Sequence[MovedRows]) -> None:
        for table, own in zip(self._tables, moved, strict=True):
            table.keep_moved(worker, own, self.version)

    def _close_round(self, rate: float, updates: int) -> None:
        """Apply the union of the parts that the dense store just applied, unless a table would become non-finite."""
        context = PushContext(self.version, 0, rate, updates)
        for table, rows in zip(self._tables, self._round.union(), strict=True):
            moved = table.moved("", rows, context)
            if moved.finite:
                table.keep_moved("", moved, self.version)

    def _computed_on(self, worker: str, sequence: int) -> int:
        """Return the version of the weights that the gradient was computed on."""
        versions = self._backup_versions[worker]
        return versions[sequence] if sequence in versions else next(reversed(versions.values()))

    def _answer(self, worker: str, sequence: int, reply: Reply, request: DeltaRequest | None) -> Reply:
        """Complete the reply of the dense store with the tables: all of them, or the rows that changed."""
        assert reply.weights is not None
        rows = None if self._looked_up else self._changed_rows(worker, sequence, request)
        self._keep_version(worker, sequence)
        if self._looked_up:
            return replace(reply, weights=self._own(reply.weights))
        if request is None or rows is None:
            return replace(reply, weights=self._joined(reply.weights))
        payload = self._layout.encode(RowVector(self._own(reply.weights), rows))
        return replace(reply, weights=None, delta=WeightDelta(ROWS, payload, request.base))

    def _changed_rows(self, worker: str, sequence: int, request: DeltaRequest | None) -> tuple[Rows, ...] | None:
        """Return the rows of each table that changed since the base of a delta; None if all weights must be sent."""
        versions = self._backup_versions.get(worker, {})
        base = versions.get(request.base) if request and request.codec is ROWS and sequence not in versions else None
        if base is None:
            return None
        rows = [table.changed_since(base) for table in self._tables]
        known = tuple(changed for changed in rows if changed is not None)
        return known if len(known) == len(rows) else None

    def _keep_version(self, worker: str, sequence: int) -> None:
        """Keep the version of a reply, and free the log entries that no worker needs any more."""
        versions = self._backup_versions.setdefault(worker, {})
        if not sequence:
            versions.clear()
        versions[sequence] = self.version
        while len(versions) > self.overlap + 1:
            del versions[next(iter(versions))]
        oldest = min(min(versions.values()) for versions in self._backup_versions.values())
        for table in self._tables:
            table.keep(oldest, sum(map(len, self._backup_versions.values())))

    def _joined(self, dense: Vector) -> Vector:
        return self._layout.join(self._own(dense), [table.weights for table in self._tables])

    def _own(self, dense: Vector) -> Vector:
        return dense[: self._layout.dense_size]

    @staticmethod
    def _at_least_one(dense: Vector) -> Vector:
        return dense if dense.size else np.zeros(1, np.float32)


class RowRound:
    """Received parts of the newest round; the dense store checks and counts them.

    Parts are summed in their own order, independent of the order of arrival.
    """

    def __init__(self) -> None:
        self._number = -1
        self._parts: dict[int, tuple[tuple[Rows, ...], float]] = {}
        self._added = False

    def add(self, gradient: Gradient, vector: RowVector) -> None:
        """Keep a copy of a part; the first one of a new round replaces the old round."""
        if gradient.round != self._number:
            self._number, self._parts = gradient.round, {}
        rows = tuple(Rows(own.index.copy(), own.values.copy()) for own in vector.rows)
        self._parts[gradient.part] = (rows, gradient.weight)
        self._added = gradient.added

    def union(self) -> list[Rows]:
        """Return, for each table, the gradient of all parts: their mean by denominators, or the sum for sums."""
        parts = [self._parts[part] for part in sorted(self._parts)]
        denominator = 1.0 if self._added else sum(weight for _, weight in parts)
        found = []
        for own in zip(*(rows for rows, _ in parts), strict=True):
            index = np.concatenate([rows.index for rows in own])
            weighted = [rows.values * np.float32(weight) for rows, (_, weight) in zip(own, parts, strict=True)]
            total = Rows.summed(index, np.concatenate(weighted))
            found.append(Rows(total.index, total.values / np.float32(denominator)))
        return found
