"""A shard with tables: everything dense in a :class:`~nfdt.shard.store.ShardStore`, and the tables beside it by rows.

Both move under one lock: one push, one version. The dense store decides what is a duplicate, what is dropped, and what
staleness is; the tables follow it. A worker that says which answer it holds gets the dense weights and the rows that
have changed since; any other one gets all weights as one flat vector, and may push such a one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.codecs.rows import ROWS
from nfdt.core.arrays.table_rows import Rows, RowVector, TableLayout
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.shard.engine import Engine
from nfdt.shard.messages import Difference, Gradient, Reply, Vector, Wish
from nfdt.shard.row_round import RowRound
from nfdt.shard.store import PULL_TIMEOUT_S, ShardStore
from nfdt.shard.table import Arrival, Moved, Table


class SparseStore:
    """Thread-safe store of one shard with tables; see :class:`~nfdt.shard.store.ShardStore` for its methods.

    Args:
        dense: What is outside the tables, of one element if there is nothing. It applies pushes as they come, or
            in rounds; it merges no others.
        engine: The dense store's; says the learning rate.
        tables: In the layout's order.
        layout: Of this shard.
    """

    def __init__(self, dense: ShardStore, engine: Engine, tables: Sequence[Table], layout: TableLayout) -> None:
        self.overlap = dense.overlap
        self._dense = dense
        self._engine = engine
        self._tables = list(tables)
        self._layout = layout
        self._changed = threading.Condition()
        self._round = RowRound()
        self._waited_s = self._busy_s = 0.0
        self._sent: dict[str, dict[int, int]] = {}  # worker -> sequence of a request -> version of its answer

    @property
    def size(self) -> int:
        """Number of elements, those of the tables included."""
        return self._layout.size

    @property
    def version(self) -> int:
        """Updates applied so far."""
        return self._dense.version

    @property
    def closed_round(self) -> int:
        """See :class:`ShardStore`."""
        return self._dense.closed_round

    def pull(
        self,
        worker: str,
        *,
        sequence: int = 0,
        min_version: int = 0,
        timeout_s: float = PULL_TIMEOUT_S,
        wish: Wish | None = None,
    ) -> Reply:
        """The weights as they are, or what is new in them; see :meth:`ShardStore.pull`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.version >= min_version, timeout_s):
                raise ProtocolError(
                    f"Pull by {worker}: expected version {min_version} within {timeout_s:g} s. "
                    f"Received: version {self.version}; a push is missing."
                )
            return self._answer(worker, sequence, self._dense.pull(worker, sequence=sequence), wish)

    def push(self, worker: str, gradient: Gradient, *, want_weights: bool = True, wish: Wish | None = None) -> Reply:
        """Apply a gradient at most once; its values are a flat vector, or the bytes of rows.

        Raises:
            ShapeMismatch: it is of another model.
            ProtocolError: the worker never pulled, or parts of a round contradict each other.
        """
        vector, alone = self._received(worker, gradient.values), not gradient.round
        asked_at = time.perf_counter()
        with self._changed:
            began_at = time.perf_counter()
            before, updates, rate = self.version, self._engine.updates, self._engine.learning_rate
            moved = self._moved(worker, gradient, vector.rows, rate, updates) if alone and vector.finite else []
            finite = vector.finite and all(table.finite for table in moved)
            dense = replace(gradient, values=self._dense_part(vector, finite))
            reply = self._dense.push(worker, dense, want_weights=want_weights)
            if alone and reply.applied:
                self._keep(worker, moved)
            elif not alone and reply.applied:
                self._round.take(gradient, vector)
            if not alone and self.version > before:
                self._close_round(rate, updates)
            reply = self._answer(worker, gradient.sequence, reply, wish) if want_weights else reply
            self._waited_s += began_at - asked_at
            self._busy_s += time.perf_counter() - began_at
            return reply

    def flush(self) -> int:
        """Apply the parts of a round that is not complete; returns the version."""
        with self._changed:
            before, updates, rate = self.version, self._engine.updates, self._engine.learning_rate
            if self._dense.flush() > before:
                self._close_round(rate, updates)
            return self.version

    def forget(self, worker: str) -> None:
        """Free what is kept for a worker that is gone; its next sequence may start again."""
        with self._changed:
            self._dense.forget(worker)
            self._sent.pop(worker, None)
            for table in self._tables:
                table.forget(worker)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate from the next update on."""
        with self._changed:
            self._dense.set_learning_rate(value)

    def statistics(self) -> dict[str, Any]:
        """Counts of this shard and per worker, ready for JSON."""
        with self._changed:
            return {**self._dense.statistics(), "busy_s": self._busy_s, "wait_s": self._waited_s}

    def read(self, *, weights_only: bool = False) -> tuple[Vector, dict[int, npt.NDArray[Any]]]:
        """Copies of weights and of the shard's part of the optimizer's variables, at one moment."""
        with self._changed:
            dense, optimizer = self._dense.read(weights_only=weights_only)
            return self._joined(dense), optimizer

    def write(self, weights: Vector, optimizer: dict[int, npt.NDArray[Any]]) -> int:
        """Replace weights and, where given, optimizer variables: a new version.

        Raises:
            ShapeMismatch: the weights have another size.
        """
        if weights.shape != (self.size,):
            raise ShapeMismatch(f"Write: expected {self.size} weights. Received: shape {weights.shape}.")
        with self._changed:
            version = self._dense.write(self._at_least_one(self._layout.dense(weights)), optimizer)
            for table, values in zip(self._tables, self._layout.views(weights), strict=True):
                table.replace(values, version)
            self._changed.notify_all()
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

    def _dense_part(self, vector: RowVector, finite: bool) -> Vector:
        """What the dense store is pushed: it drops what is not finite, and so shall it drop these rows."""
        dense = self._at_least_one(vector.dense)
        return dense if finite else np.full_like(dense, np.nan)

    # -- under the lock

    def _moved(self, worker: str, gradient: Gradient, rows: Sequence[Rows], rate: float, updates: int) -> list[Moved]:
        """What a push would make of the tables; the dense store refuses one of a worker that is not known."""
        if worker not in self._sent:
            return []
        computed_on = self._computed_on(worker, gradient.computed_on)
        arrival = Arrival(computed_on, self.version - computed_on, rate * gradient.rate, updates)
        return [table.moved(worker, own, arrival) for table, own in zip(self._tables, rows, strict=True)]

    def _keep(self, worker: str, moved: Sequence[Moved]) -> None:
        for table, own in zip(self._tables, moved, strict=True):
            table.keep_moved(worker, own, self.version)
        self._changed.notify_all()

    def _close_round(self, rate: float, updates: int) -> None:
        """Apply the mean of the parts that the dense store has just applied; a table it would spoil stays as it is."""
        arrival = Arrival(self.version, 0, rate, updates)
        for table, rows in zip(self._tables, self._round.mean(), strict=True):
            moved = table.moved("", rows, arrival)
            if moved.finite:
                table.keep_moved("", moved, self.version)
        self._changed.notify_all()

    def _computed_on(self, worker: str, sequence: int) -> int:
        """The version of the answer that the gradient was computed on."""
        sent = self._sent[worker]
        return sent[sequence] if sequence in sent else next(reversed(sent.values()))

    def _answer(self, worker: str, sequence: int, reply: Reply, wish: Wish | None) -> Reply:
        sent = self._sent.setdefault(worker, {})
        base = sent.get(wish.base) if wish and wish.codec is ROWS and sequence not in sent else None
        rows = [] if base is None else [table.changed_since(base) for table in self._tables]
        if not sequence:
            sent.clear()
        sent[sequence] = self.version
        while len(sent) > self.overlap + 1:
            del sent[next(iter(sent))]
        oldest = min(min(versions.values()) for versions in self._sent.values())
        for table in self._tables:
            table.keep(oldest, sum(map(len, self._sent.values())))
        assert reply.weights is not None
        known = [changed for changed in rows if changed is not None]
        if wish is None or base is None or len(known) < len(rows):
            return replace(reply, weights=self._joined(reply.weights))
        payload = self._layout.encode(RowVector(self._own(reply.weights), tuple(known)))
        return replace(reply, weights=None, difference=Difference(ROWS, payload, wish.base))

    def _joined(self, dense: Vector) -> Vector:
        return self._layout.join(self._own(dense), [table.weights for table in self._tables])

    def _own(self, dense: Vector) -> Vector:
        return dense[: self._layout.dense_size]

    @staticmethod
    def _at_least_one(dense: Vector) -> Vector:
        return dense if dense.size else np.zeros(1, np.float32)
