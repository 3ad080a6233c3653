"""State in chunks over gRPC: how it is cut, sent with a single copy, and joined again."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from nfdt.core.errors import ProtocolError
from nfdt.core.wire.shards_pb2 import StateChunk

CHUNK_BYTES = 2 * 2**20

_PAYLOAD_TAG = b"\x7a"  # field 15 (StateChunk.data), wire type 2


def encode_chunk(header: StateChunk, payload: Any = b"") -> bytes:
    """Encode a chunk with the fields of ``header``, which has no data, and with ``payload`` as its data.

    The message that protobuf builds would copy the payload twice more, into memory that is allocated for each chunk.

    Args:
        header: The chunk without its data.
        payload: Bytes, or anything with a contiguous buffer such as a NumPy array; copied once.

    Raises:
        ProtocolError: more than ``CHUNK_BYTES`` of payload.
    """
    view = memoryview(payload)
    if not view.nbytes:
        return header.SerializeToString()
    if view.nbytes > CHUNK_BYTES:
        raise ProtocolError(f"Chunk: expected at most {CHUNK_BYTES} bytes of payload. Received: {view.nbytes}.")
    return b"".join((header.SerializeToString(), _PAYLOAD_TAG, _varint(view.nbytes), view.cast("B")))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def split(total_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Yield the byte ranges of the chunks that carry ``total_bytes``; one empty range for 0 bytes."""
    for start in range(0, max(total_bytes, 1), chunk_bytes):
        yield slice(start, min(start + chunk_bytes, total_bytes))


def payloads(chunks: Iterable[Any], most: int, what: str) -> Iterator[bytes]:
    """Yield the payloads of the chunks of one transfer, in order, as they arrive.

    A chunk without data ends the transfer early; it states as ``total_bytes`` what has been sent before.

    Args:
        chunks: All messages with ``offset``, ``total_bytes`` and ``data``, in order.
        most: Largest size of the whole, in bytes.
        what: Name of the transfer in errors.

    Raises:
        ProtocolError: the transfer is too large or incomplete, or a chunk is not the next one.
    """
    at = total = 0
    for chunk in chunks:
        total, stop = chunk.total_bytes, at + len(chunk.data)
        if total > most:
            raise ProtocolError(f"{what}: expected at most {most} bytes. Received: {total}.")
        if chunk.offset != at or stop > total or (stop == at and stop != total):
            raise ProtocolError(
                f"{what}: expected bytes from {at} up to {total}. Received: {chunk.offset} to "
                f"{chunk.offset + len(chunk.data)}."
            )
        yield chunk.data
        at = stop
    if at != total:
        raise ProtocolError(f"{what}: expected {total} bytes. Received: {at}.")


def spooled(chunks: Iterable[Any], most: int, what: str) -> mmap.mmap | bytes:
    """Return the payloads of the chunks of one transfer, joined in a file without a name, which is mapped.

    Args:
        chunks: All messages with ``offset``, ``total_bytes`` and ``data``, in order.
        most: Largest size of the whole, in bytes.
        what: Name of the transfer in errors.

    Raises:
        ProtocolError: see :func:`payloads`.
    """
    with tempfile.TemporaryFile() as file:
        for data in payloads(chunks, most, what):
            file.write(data)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else b""


def cut(
    total: int, parts: Iterable[Any], chunk_bytes: int = CHUNK_BYTES, at: int = 0
) -> Iterator[tuple[StateChunk, memoryview]]:
    """Yield the chunks of one transfer, each without its data, and that as a view of a part; see :func:`encode_chunk`.

    Args:
        total: Number of the bytes of the transfer.
        parts: Bytes, or anything with a contiguous buffer, one behind the other; at least one.
        chunk_bytes: Largest payload.
        at: Offset of the first part.
    """
    for view in (memoryview(part).cast("B") for part in parts):
        for piece in split(view.nbytes, chunk_bytes):
            yield StateChunk(offset=at + piece.start, total_bytes=total), view[piece]
        at += view.nbytes
