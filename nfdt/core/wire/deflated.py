"""Compression of the chunks of a transfer, where the link is slower than the compression."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

from nfdt.core.errors import ProtocolError

SLOW_BYTES_PER_S = 12.5e6  # 100 Mbit/s; one core compresses 83e6 of images and more
WORTH = 0.9  # of its size, that a compressed chunk has at most


class Deflater:
    """Compression of one transfer, once a chunk has taken long, for as long as it saves a tenth.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._slow, self._worth = False, True
        self._sent, self._began = 0, clock()

    def pack(self, data: bytes) -> tuple[bytes, bool]:
        """Return a chunk as it is sent, and whether it is compressed; the chunk before has been sent by now."""
        if self._sent:
            self._slow = self._slow or self._sent < SLOW_BYTES_PER_S * (self._clock() - self._began)
        packed, compressed = data, False
        if self._slow and self._worth:
            smaller = zlib.compress(data, zlib.Z_BEST_SPEED)
            compressed = self._worth = len(smaller) <= WORTH * len(data)
            packed = smaller if compressed else data
        self._sent, self._began = len(packed), self._clock()
        return packed, compressed


def inflated(data: bytes, compressed: bool, most: int) -> bytes:
    """Return a chunk as it was before :meth:`Deflater.pack`.

    Args:
        data: The chunk as it was received.
        compressed: Whether it is compressed.
        most: Largest size of the chunk in bytes; no more memory is taken.

    Raises:
        ProtocolError: the chunk is larger, or no compressed data.
    """
    if not compressed:
        return data
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, most)
    except zlib.error as error:
        raise ProtocolError(f"Chunk: expected compressed data. Received: {len(data)} bytes that are not.") from error
    if not stream.eof:
        raise ProtocolError(f"Chunk: expected at most {most} bytes, in {len(data)}. Received: more, or a part.")
    return whole
