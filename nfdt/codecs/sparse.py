"""Formats of some elements: a codec of the greatest, whose others accumulate in error feedback; and rows of tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.codecs.base import FLOAT32, Codec, Payload, Vector
from nfdt.core.errors import ProtocolError, ShapeMismatch

MAX_SIZE = 2**32
_PAIR_BYTES = 8


@dataclass(frozen=True)
class TopK(Codec):
    """The ``fraction`` of the elements with the greatest magnitude, at least one; the rest is decoded as zero.

    Layout: their indices, ascending, uint32, then their values, float32. The squared error is at most
    ``1 - fraction`` of the vector's squared norm. An element that is not finite counts as the greatest.

    Attributes:
        fraction: Fraction of the elements, above 0, at most 1. Decoding does not depend on it.
    """

    fraction: float
    name = "top-k"
    block = 0

    def kept(self, size: int) -> int:
        """Return the number of elements sent out of ``size``."""
        return min(size, max(1, math.ceil(self.fraction * size)))

    def encoded_bytes(self, size: int) -> int:
        """Return 8 bytes per element that is sent."""
        return _PAIR_BYTES * self.kept(size)

    def check(self, received_bytes: int, size: int) -> None:
        """Allow pairs of 8 bytes, for at most all elements."""
        if received_bytes % _PAIR_BYTES or received_bytes > _PAIR_BYTES * size:
            raise ShapeMismatch(
                f"Payload in codec {self.name}: expected 8 bytes for each of at most {size} elements. "
                f"Received: {received_bytes} bytes. The sender has another model; restart it."
            )

    def encode(self, vector: Vector) -> Payload:
        """Encode the greatest elements.

        Raises:
            ShapeMismatch: An index does not fit into 32 bits.
        """
        if vector.size >= MAX_SIZE:
            raise ShapeMismatch(
                f"Codec {self.name}: expected fewer than {MAX_SIZE} elements in a shard. Received: {vector.size}. "
                "Use more shards."
            )
        count = self.kept(vector.size)
        payload = np.empty(_PAIR_BYTES * count, np.uint8)
        if count:
            places = _greatest(np.abs(vector), count)
            payload[: 4 * count].view("<u4")[:] = places
            payload[4 * count :].view(FLOAT32)[:] = vector[places]
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """Write the elements that were sent, and zero for the others."""
        count = payload.size // _PAIR_BYTES
        places = payload[: 4 * count].view("<u4").astype(np.int64)  # a copy: checked values are used
        if count and (places[-1] >= out.size or not (places[1:] > places[:-1]).all()):
            raise ProtocolError(
                f"Payload in codec {self.name}: expected rising places below {out.size}. Received: {count} places up "
                f"to {places.max()}."
            )
        out[:] = 0
        out[places] = payload[4 * count :].view(FLOAT32)


def _greatest(magnitudes: Vector, count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the ``count`` greatest, ascending; the first ones among equals. NaN is the greatest."""
    least = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    if np.isnan(least):
        return np.flatnonzero(np.isnan(magnitudes))[:count]
    places = np.flatnonzero(~(magnitudes <= least))
    if places.size < count:
        equal = np.flatnonzero(magnitudes == least)[: count - places.size]
        places = np.sort(np.concatenate([places, equal]))
    return places


class RowFormat(Codec):
    """Payloads of :class:`nfdt.core.arrays.table_rows.TableLayout`, for shards and clients that hold tables.

    Attributes:
        name: Name in a frame's header.
    """

    name = "rows"
    block = 0

    def encoded_bytes(self, size: int) -> int:
        """Return the maximum number of bytes, for tables of one column."""
        return 8 * size + 4

    def check(self, received_bytes: int, size: int) -> None:
        """Raise ShapeMismatch if the bytes are too many for ``size`` elements; reading checks their content."""
        if received_bytes > self.encoded_bytes(size):
            raise ShapeMismatch(f"Rows: expected at most {self.encoded_bytes(size)} bytes. Received: {received_bytes}.")

    def encode(self, vector: Vector) -> Payload:
        """Raise ProtocolError: a vector alone has no rows."""
        raise ProtocolError("Rows: expected a job with tables. Received: a request for rows of one without.")

    def decode(self, payload: Payload, out: Vector) -> None:
        """Raise ProtocolError: a vector alone has no rows."""
        raise ProtocolError("Rows: expected a job with tables. Received: rows for one without.")


ROWS = RowFormat()
