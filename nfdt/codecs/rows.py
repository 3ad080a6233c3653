"""The format of table rows: it is no codec of single vectors, but frames name it in place of a codec."""

from __future__ import annotations

from nfdt.codecs.base import Payload, Vector
from nfdt.core.errors import ProtocolError, ShapeMismatch


class RowFormat:
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
