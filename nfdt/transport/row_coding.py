"""The worker's side of tables: gradients are sent as rows, and changed rows are received."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from nfdt.codecs.sparse import ROWS, RowFormat
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import ChangedRows, Rows, RowVector, RowWeights, TableLayout, Vector
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.transport.base import check_gradient
from nfdt.transport.coding import AnswerPart, EncodedGradient


class RowCoding:
    """Encoder of one worker's pushes and decoder of the replies, in their order; replaces ``Coding`` for tables.

    Args:
        layout: Layout of the whole model.
        tables: Indices of the variables that are tables.
        shards: Number of shards of the job.
    """

    def __init__(self, layout: ParameterLayout, tables: Sequence[int], shards: int) -> None:
        runs = layout.cut(shards)
        self._bounds = [run.elements for run in runs]
        self._whole = TableLayout.of(layout, tables)
        self._parts = [TableLayout.of_run(run, tables) for run in runs]
        ends = [0, *itertools.accumulate(part.dense_size for part in self._parts)]
        self._dense = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self._first = [self._first_rows(run.start, part) for run, part in zip(runs, self._parts, strict=True)]
        self._news: list[ChangedRows] = []
        self._answer = 0

    @property
    def reply_codec(self) -> RowFormat:
        """Format of changed rows."""
        return ROWS

    def encode(self, gradient: RowVector | Vector) -> EncodedGradient:
        """Encode a gradient for each shard; for a flat vector, shape ``(P,)``, its non-zero rows.

        Raises:
            ShapeMismatch: the gradient belongs to another model.
        """
        if not isinstance(gradient, RowVector):
            check_gradient(gradient, self._bounds)
            gradient = self._whole.touched(gradient)
        vector = gradient
        if vector.dense.size != self._whole.dense_size or len(vector.rows) != len(self._whole.tables):
            raise ShapeMismatch(
                f"Gradient: expected {self._whole.dense_size} elements beside {len(self._whole.tables)} tables. "
                f"Received: {vector.dense.size} beside {len(vector.rows)}."
            )
        payloads = []
        for part, bound, firsts in zip(self._parts, self._dense, self._first, strict=True):
            own = [
                vector.rows[table].within(first, first + place.rows)
                for (table, first), place in zip(firsts, part.tables, strict=True)
            ]
            payloads.append(part.encode(RowVector(vector.dense[bound], tuple(own))))
        return EncodedGradient(ROWS, payloads)

    def decode(self, sequence: int, parts: Sequence[AnswerPart], out: Vector) -> Any:
        """Assemble the weights of reply ``sequence``; see :meth:`nfdt.transport.coding.Coding.decode`.

        Returns:
            All weights, ``out``, if every shard sent all; else :class:`nfdt.core.arrays.table_rows.RowWeights`.

        Raises:
            ProtocolError: the changes are not based on the weights of the last reply.
        """
        dense = np.empty(self._whole.dense_size, np.float32)
        for shard, part in enumerate(parts):
            layout, bound = self._parts[shard], self._bounds[shard]
            if part.delta is not None:
                changed = self._changed(part, layout)
                dense[self._dense[shard]] = changed.dense
                self._note(shard, changed.rows)
                continue
            if part.weights is not None:
                np.copyto(out[bound], part.weights)
            dense[self._dense[shard]] = layout.dense(out[bound])
            self._news[:] = [news for news in self._news if (news.table, news.first) not in self._first[shard]]
            self._note(shard, [view.copy() for view in layout.views(out[bound])])
        self._answer = sequence
        return out if all(part.delta is None for part in parts) else RowWeights(dense, self._news)

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Do nothing: the format of rows does not depend on times."""

    def report(self) -> dict[str, Any]:
        """Return an empty report, as rows are lossless."""
        return {}

    def _changed(self, part: AnswerPart, layout: TableLayout) -> RowVector:
        if part.base != self._answer or part.delta is None:
            raise ProtocolError(
                f"Answer: expected all weights, or what is new since answer {self._answer}. Received: what is new "
                f"since answer {part.base}."
            )
        return layout.decode(np.array(part.delta))  # kept longer than its memory stays valid

    def _note(self, shard: int, rows: Sequence[Rows | Vector]) -> None:
        for (table, first), new in zip(self._first[shard], rows, strict=True):
            self._news.append(ChangedRows(table, first, new))

    def _first_rows(self, start: int, part: TableLayout) -> list[tuple[int, int]]:
        """Return, for each table of a shard, the index of the model's table and the first row there."""
        found = []
        for place in part.tables:
            at = start + place.start
            table = next(i for i, whole in enumerate(self._whole.tables) if whole.start <= at < whole.stop)
            found.append((table, (at - self._whole.tables[table].start) // place.width))
        return found
