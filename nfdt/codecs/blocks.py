"""Blocks of a vector, which are encoded in sequence while they are in cache."""

from __future__ import annotations

from collections.abc import Iterator

from nfdt.codecs.base import Codec

BUCKET = 512
"""Elements that share a scale."""
BLOCK = 64 * BUCKET
"""Elements that are encoded independently of others, by codecs other than ``top-k``."""


def blocks(codec: Codec, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield the ranges of independent blocks, and of their bytes in the payload of all ``size`` elements."""
    at, step = 0, codec.block or max(size, 1)
    for start in range(0, size, step):
        stop = min(start + step, size)
        count = codec.encoded_bytes(stop - start)
        yield slice(start, stop), slice(at, at + count)
        at += count
