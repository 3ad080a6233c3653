"""Blocks of a vector, which are encoded in sequence while they are in cache, and the memory of the loops that do it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

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


class Scratch(NamedTuple):
    """Memory for one bucket, and views of it, which are made here because compiling views takes long.

    Attributes:
        owed: The numbers to encode, and what they become on the way; with its bits, and two of them as one integer.
        decoded: The decoded numbers, and their bits.
        coded: The levels as bytes, and as other integers.
        word: The scale, its bits and its bytes.
    """

    owed: Any
    bits: Any
    pairs: Any
    decoded: Any
    decoded_bits: Any
    coded: Any
    coded_int8: Any
    coded_int16: Any
    word: Any
    word_bits: Any
    word_bytes: Any


def make_scratch() -> Scratch:
    """Return memory for one call of a loop."""
    owed, decoded = np.empty((2, BUCKET), np.float32)
    coded, scale = np.zeros(2 * BUCKET, np.uint8), np.zeros(1, np.float32)
    return Scratch(
        *(owed, owed.view(np.int32), owed.view(np.uint64)),
        *(decoded, decoded.view(np.int32)),
        *(coded, coded.view(np.int8), coded.view(np.int16)),
        *(scale, scale.view(np.int32), scale.view(np.uint8)),
    )
