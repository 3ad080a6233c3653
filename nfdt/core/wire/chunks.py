"""Chunked transfers over gRPC; built and parsed here so that a chunk's payload is copied at most once.

A chunk is any message whose last field is ``bytes`` number 15 (``StateChunk.data``). The small fields are serialised by
protobuf, then the payload's tag, length and bytes are appended: one copy. Parsing skips the small fields and returns a
view of the payload: no copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from nfdt.core.errors import ProtocolError

CHUNK_BYTES = 2 * 2**20
MAX_HEADER_BYTES = 64 * 2**10

_PAYLOAD_TAG = 0x7A  # field 15, wire type 2
_FIXED_BYTES = {1: 8, 5: 4}
_Header = TypeVar("_Header", bound=Message)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_chunk(header: Message, payload: Any = b"") -> bytes:
    """Encode one message: ``header`` (its field 15 left empty) with ``payload`` as field 15.

    Args:
        header: The small fields.
        payload: Bytes, or anything with a contiguous buffer such as a NumPy array; copied once.

    Raises:
        ProtocolError: more than ``CHUNK_BYTES`` of payload.
    """
    view = memoryview(payload)
    if not view.nbytes:
        return header.SerializeToString()
    if view.nbytes > CHUNK_BYTES:
        raise ProtocolError(f"Chunk: expected at most {CHUNK_BYTES} bytes of payload. Received: {view.nbytes}.")
    return b"".join((header.SerializeToString(), b"\x7a", _varint(view.nbytes), view.cast("B")))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (value, position behind it) of the varint at ``at``."""
    value = 0
    for count in range(10):
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at + count + 1
    raise ProtocolError("Chunk: expected a number of at most 10 bytes. Received a longer one.")


def _find_payload(data: bytes) -> tuple[int, int]:
    """Return (end of the small fields, start of the payload); both ``len(data)`` without a payload."""
    at = 0
    while at < len(data):
        tag, behind = _read_varint(data, at)
        if tag == _PAYLOAD_TAG:
            length, start = _read_varint(data, behind)
            if length != len(data) - start:
                raise ProtocolError(
                    f"Chunk: expected {length} bytes of payload at its end. Received: {len(data) - start}."
                )
            return at, start
        at = _skip(data, tag & 7, behind)
    if at > len(data):
        raise ProtocolError(f"Chunk: its last field ends at byte {at}. Received: {len(data)} bytes.")
    return at, at


def _skip(data: bytes, wire_type: int, at: int) -> int:
    """Return the position behind a field's value."""
    if wire_type == 0:
        return _read_varint(data, at)[1]
    if wire_type == 2:
        length, at = _read_varint(data, at)
        return at + length
    if wire_type not in _FIXED_BYTES:
        raise ProtocolError(f"Chunk: expected wire types 0, 1, 2 or 5. Received: {wire_type}.")
    return at + _FIXED_BYTES[wire_type]


def decode_chunk(data: bytes, kind: type[_Header]) -> tuple[_Header, memoryview]:
    """Return (small fields, view of field 15) of a message of ``kind``; the view keeps ``data`` alive.

    Raises:
        ProtocolError: the message is malformed, truncated, or larger than a chunk may be.
    """
    if len(data) > CHUNK_BYTES + MAX_HEADER_BYTES:
        raise ProtocolError(f"Chunk: expected at most {CHUNK_BYTES + MAX_HEADER_BYTES} bytes. Received: {len(data)}.")
    try:
        end, start = _find_payload(data)
        if end > MAX_HEADER_BYTES or len(data) - start > CHUNK_BYTES:
            raise ProtocolError(f"Chunk: a field is too large; {end} bytes before a payload of {len(data) - start}.")
        return kind.FromString(data[:end]), memoryview(data)[start:]
    except IndexError:
        raise ProtocolError(f"Chunk: truncated after {len(data)} bytes.") from None
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"Chunk: expected a {kind.__name__}. Received something else: {error}") from None


def split(total_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Yield the byte ranges of the chunks that carry ``total_bytes``; one empty range for 0 bytes."""
    for start in range(0, max(total_bytes, 1), chunk_bytes):
        yield slice(start, min(start + chunk_bytes, total_bytes))


class Assembly:
    """Assembles the payloads of one transfer in a preallocated buffer.

    Args:
        buffer: Writable and contiguous; exactly ``total_bytes`` long.
    """

    def __init__(self, buffer: Any) -> None:
        self._view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else memoryview(bytearray())
        self._received = 0

    @property
    def complete(self) -> bool:
        """Whether every byte has been received."""
        return self._received == self._view.nbytes

    def add(self, offset: int, payload: memoryview) -> None:
        """Copy one chunk to its offset.

        Raises:
            ProtocolError: the chunk is not the next one, or extends beyond the end.
        """
        stop = offset + payload.nbytes
        if offset != self._received or stop > self._view.nbytes or (not payload.nbytes and self._view.nbytes):
            raise ProtocolError(
                f"Chunk: expected bytes from {self._received} up to {self._view.nbytes}. Received: {offset} to {stop}."
            )
        self._view[offset:stop] = payload
        self._received = stop
