"""The worker's side of codecs: encodes gradients with error feedback or as rows, and decodes deltas of weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nfdt.codecs import IDENTITY, Codec, ErrorFeedback
from nfdt.codecs.base import Payload, Vector
from nfdt.codecs.sparse import ROWS
from nfdt.codecs.widths import is_finite
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.table_rows import ChangedRows, RowIndex, Rows, RowVector, RowWeights, TableLayout
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.transport.base import WeightDelta, check_gradient
from nfdt.transport.choice import CodecChoice


class Coding:
    """Encoder of one worker's pushes and decoder of the replies, in their order.

    The error of a push is kept here and sent with later pushes, also across epochs. The error left when the worker
    leaves is never sent; :meth:`report` returns its size.

    Args:
        choice: Choice of the codecs.
        bounds: Range of each shard's elements.

    Attributes:
        push_codec: Codec of the last push.
    """

    def __init__(self, choice: CodecChoice, bounds: Sequence[slice]) -> None:
        self._choice, self._bounds = choice, bounds
        self._feedback = ErrorFeedback(bounds[-1].stop)
        self.push_codec: Codec = IDENTITY
        self._sent: list[Payload] = []
        self._base: Vector | None = None
        self._base_answer = 0
        self._uses: dict[str, dict[str, dict[str, int]]] = {"push": {}, "reply": {}}

    @property
    def reply_codec(self) -> Codec | None:
        """Codec of the deltas to request; None for all weights."""
        codec = self._choice.reply
        return None if codec is IDENTITY else codec

    def encode(self, gradient: Vector, compute_s: float = 0.0) -> list[Payload]:
        """Encode, for each shard, the sum of a gradient, shape ``(P,)``, and the residual of earlier pushes.

        The payloads are valid until the reply arrives.
        A non-finite sum is sent as NaN to every shard, so that all of them drop it; the residual stays.
        """
        payloads = None
        if finite := is_finite(gradient):  # else there is nothing to measure
            self._choice.pushes(gradient, self._feedback.residual, compute_s)
        codec = self.push_codec = self._choice.push
        if finite:
            payloads = self._feedback.encode(codec, gradient, self._bounds)
        if payloads is None:
            lost = np.full(gradient.size, np.nan, np.float32)  # on one shard alone it would be half a step
            payloads = [codec.encode(lost[bound]) for bound in self._bounds]
        self._sent = payloads
        self._count("push", codec, sum(payload.nbytes for payload in payloads))
        return payloads

    def decode(self, sequence: int, parts: Sequence[Vector | WeightDelta | None], out: Vector) -> Vector:
        """Assemble the weights of reply ``sequence`` in ``out``, which may already hold parts of them.

        Args:
            sequence: Number of the reply; replies arrive in order.
            parts: Weights or a delta from each shard; None: ``out`` holds its weights.
            out: Shape ``(P,)``; the client must not change it until the next reply is decoded into another vector.

        Raises:
            ProtocolError: a delta is not based on the weights of the last reply.
        """
        size = 0
        for part, bound in zip(parts, self._bounds, strict=True):
            if isinstance(part, WeightDelta):
                self._add(part, bound, out)
                size += part.payload.nbytes
                continue
            if part is not None:
                np.copyto(out[bound], part)
            size += out[bound].nbytes
        if self._base is not None:
            self._choice.received(self._base, out)
        self._base, self._base_answer = out, sequence
        self._count("reply", parts[0].codec if isinstance(parts[0], WeightDelta) else IDENTITY, size)
        return out

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Record the time of an exchange, without the time that the shards took to serve it."""
        self._choice.exchanged(sent_bytes, received_bytes, seconds)

    def report(self) -> dict[str, Any]:
        """Return messages and bytes by direction and codec, the residual relative to the last push, and decisions."""
        residual, sent = float(np.linalg.norm(self._feedback.residual)), self._norm_sent()
        return {
            **self._uses,
            "residual": round(residual / sent, 6) if sent else 0.0,
            "decisions": self._choice.decisions(),
        }

    def _add(self, part: WeightDelta, bound: slice, out: Vector) -> None:
        if self._base is None or part.base != self._base_answer:
            raise ProtocolError(
                f"Answer: expected all weights, or a difference to those of answer {self._base_answer}. Received: a "
                f"difference to answer {part.base}."
            )
        part.codec.decode_and_add(part.payload, self._base[bound], out[bound])

    def _norm_sent(self) -> float:
        """Return the norm of the last push as the shards decoded it."""
        if not self._sent:
            return 0.0
        decoded = np.empty(self._bounds[-1].stop, np.float32)
        for payload, bound in zip(self._sent, self._bounds, strict=True):
            self.push_codec.decode(payload, decoded[bound])
        return float(np.linalg.norm(decoded))

    def _count(self, direction: str, codec: Codec, size: int) -> None:
        use = self._uses[direction].setdefault(codec.name, {"messages": 0, "bytes": 0})
        use["messages"] += 1
        use["bytes"] += size


@dataclass(frozen=True)
class Lookup:
    """Rows that are requested from each shard.

    Attributes:
        numbers: Row numbers of each table of the model.
        parts: For each shard, the row numbers of each of its tables, counted from its first row.
        places: For each shard, the tables of the model that its own are parts of, and their widths.
        values: Memory for the rows, flat: those of the first shard, table after table, then those of the next one.
    """

    numbers: Sequence[RowIndex]
    parts: list[list[RowIndex]]
    places: list[list[tuple[int, int]]]
    values: Vector

    @classmethod
    def of(
        cls, numbers: Sequence[RowIndex], parts: list[list[RowIndex]], places: list[list[tuple[int, int]]]
    ) -> Lookup:
        """Return a lookup with new memory for the rows."""
        size = sum(_size(*shard) for shard in zip(parts, places, strict=True))
        return cls(numbers, parts, places, np.empty(size, np.float32))

    @property
    def bounds(self) -> list[slice]:
        """Position of the rows of each shard in :attr:`values`."""
        sizes = [_size(*shard) for shard in zip(self.parts, self.places, strict=True)]
        return [slice(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(sizes)])]

    def rows(self) -> tuple[Rows, ...]:
        """Return the rows of each table of the model, once they are in :attr:`values`."""
        found: list[list[Vector]] = [[] for _ in self.numbers]
        at = 0
        for part, places in zip(self.parts, self.places, strict=True):
            for index, (table, width) in zip(part, places, strict=True):
                found[table].append(self.values[at : at + index.size * width].reshape(index.size, width))
                at += index.size * width
        # Shards hold the rows of a table in their order.
        joined = [values[0] if len(values) == 1 else np.concatenate(values) for values in found]
        return tuple(Rows(index, values) for index, values in zip(self.numbers, joined, strict=True))


def _size(numbers: Sequence[RowIndex], places: Sequence[tuple[int, int]]) -> int:
    return sum(index.size * width for index, (_, width) in zip(numbers, places, strict=True))


class RowCoding:
    """Encoder of one worker's pushes and decoder of the replies, in their order; replaces ``Coding`` for tables.

    Args:
        layout: Layout of the whole model.
        tables: Indices of the variables that are tables.
        shards: Number of shards of the job.
        looked_up: Whether replies have no tables, as workers look up their rows.

    Attributes:
        looked_up: See the argument.
        bounds: Range of each shard's elements in the weights of a reply.
    """

    push_codec = ROWS

    def __init__(self, layout: ParameterLayout, tables: Sequence[int], shards: int, *, looked_up: bool = False) -> None:
        runs = layout.cut(shards)
        self.looked_up = looked_up
        self._whole = TableLayout.of(layout, tables)
        self._parts = [TableLayout.of_run(run, tables) for run in runs]
        ends = [0, *itertools.accumulate(part.dense_size for part in self._parts)]
        self._dense = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        self.bounds = self._dense if looked_up else [run.elements for run in runs]
        self._first = [self._first_rows(run.start, part) for run, part in zip(runs, self._parts, strict=True)]
        self._news: list[ChangedRows] = []
        self._answer = 0

    @property
    def reply_codec(self) -> Codec | None:
        """Codec of the changes to request; None where replies have no tables."""
        return None if self.looked_up else ROWS

    def lookup(self, numbers: Sequence[RowIndex]) -> Lookup:
        """Return what to request from each shard for these rows of each table, ascending."""
        parts, places = [], []
        for part, firsts in zip(self._parts, self._first, strict=True):
            own = []
            for (table, first), place in zip(firsts, part.tables, strict=True):
                begin, end = np.searchsorted(numbers[table], (first, first + place.rows))
                own.append(numbers[table][begin:end] - np.int32(first))
            parts.append(own)
            places.append([(table, place.width) for (table, _), place in zip(firsts, part.tables, strict=True)])
        return Lookup.of(numbers, parts, places)

    def encode(self, gradient: RowVector | Vector, compute_s: float = 0.0) -> list[Payload]:
        """Encode a gradient for each shard; for a flat vector, shape ``(P,)``, its non-zero rows.

        Raises:
            ShapeMismatch: the gradient belongs to another model.
        """
        if not isinstance(gradient, RowVector):
            check_gradient(gradient, [slice(0, self._whole.size)])
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
        return payloads

    def decode(self, sequence: int, parts: Sequence[Vector | WeightDelta | None], out: Vector) -> Any:
        """Assemble the weights of reply ``sequence``; see :meth:`nfdt.transport.coding.Coding.decode`.

        Returns:
            All weights, ``out``, if every shard sent all; else :class:`nfdt.core.arrays.table_rows.RowWeights`.
            Where tables are looked up, ``out`` has the other weights.

        Raises:
            ProtocolError: the changes are not based on the weights of the last reply.
        """
        if self.looked_up:
            for part, bound in zip(parts, self.bounds, strict=True):
                if part is not None:
                    np.copyto(out[bound], np.asarray(part))
            return out
        dense = np.empty(self._whole.dense_size, np.float32)
        for shard, part in enumerate(parts):
            layout, bound = self._parts[shard], self.bounds[shard]
            if isinstance(part, WeightDelta):
                changed = self._changed(part, layout)
                dense[self._dense[shard]] = changed.dense
                self._add_news(shard, changed.rows)
                continue
            if part is not None:
                np.copyto(out[bound], part)
            dense[self._dense[shard]] = layout.dense(out[bound])
            self._news[:] = [news for news in self._news if (news.table, news.first) not in self._first[shard]]
            self._add_news(shard, [view.copy() for view in layout.views(out[bound])])
        self._answer = sequence
        return out if not any(isinstance(part, WeightDelta) for part in parts) else RowWeights(dense, self._news)

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Do nothing: the format of rows does not depend on times."""

    def report(self) -> dict[str, Any]:
        """Return an empty report, as rows are lossless."""
        return {}

    def _changed(self, part: WeightDelta, layout: TableLayout) -> RowVector:
        if part.base != self._answer:
            raise ProtocolError(
                f"Answer: expected all weights, or what is new since answer {self._answer}. Received: what is new "
                f"since answer {part.base}."
            )
        return layout.decode(np.array(part.payload))  # kept longer than its memory stays valid

    def _add_news(self, shard: int, rows: Sequence[Rows | Vector]) -> None:
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
