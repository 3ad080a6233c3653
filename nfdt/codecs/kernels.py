"""Compiled loops that encode and decode vectors, each in one pass; see :mod:`nfdt.core.arrays.loops`.

A loop handles one bucket of 512 elements at a time in memory that stays in the first cache: it loads the bucket and
fills it up with zeros, encodes it, decodes it where the loss is wanted, and stores the results. All loops over a bucket
have a fixed number of turns and no branches, so that the compiler turns them into vector instructions.

Numbers are bounded and judged as integers: without its sign, a float32 is ordered as the integer of the same bits is,
and infinities and NaN are the greatest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nfdt.codecs.base import BLOCK, BUCKET
from nfdt.core.arrays.loops import compiled, compiled_part

BF16, FP16, INT8, INT4 = range(4)
KINDS = {"bf16": BF16, "fp16": FP16, "int8": INT8, "int4": INT4}
"""Formats by the names of their codecs: the argument ``kind`` of the loops."""

ROWS = BLOCK // BUCKET

_MAGNITUDE = np.int32(0x7FFF_FFFF)
_SIGN = np.int32(-0x8000_0000)
_INFINITY = np.int32(0x7F80_0000)
_QUIET_NAN = np.int32(0x7FC0_0000)
_LARGEST_HALF = np.int32(0x7F7F_0000)  # the largest finite bfloat16
_NAN = np.float32(np.nan)
_SMALLEST = np.float32(np.finfo(np.float32).tiny)
_BELOW_2_15 = np.float32(32752)
_2_112, _2_M112 = np.float32(2.0**112), np.float32(2.0**-112)
_ZERO, _ONE, _EIGHT = np.float32(0), np.float32(1), np.float32(8)
_TO_INTEGER = np.float32(3 * 2**22)
"""Added to a small number, it leaves the nearest whole number, ties to even, in the lowest bits."""
_TO_INTEGER_8 = _TO_INTEGER + _EIGHT
_MOST_8, _MOST_4 = np.float32(127), np.float32(7)
_LARGEST_8 = np.nextafter(np.finfo(np.float32).max / _MOST_8, _ZERO)
_LARGEST_4 = np.nextafter(np.finfo(np.float32).max / _MOST_4, _ZERO)


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


@compiled
def encode(kind: int, vector: Any, payload: Any, s: Scratch) -> None:
    """Encode ``vector``, shape ``(n,)`` float32, as ``payload``, uint8; buckets that are not finite become NaN."""
    owed, bits, word = s.owed, s.bits, s.word
    for start in range(0, vector.size, BUCKET):
        count = min(BUCKET, vector.size - start)
        for i in range(BUCKET):
            owed[i] = _ZERO
        part = vector[start : start + count]
        for i in range(count):
            owed[i] = part[i]
        finite = kind == BF16 or _greatest(bits) < _INFINITY
        if not finite:
            for i in range(BUCKET):
                owed[i] = _ZERO
        _write(kind, s)
        if not finite:
            word[0] = _NAN
        _put(kind, payload, start, vector.size, s)


@compiled
def encode_owed(kind: int, vector: Any, residual: Any, payload: Any, s: Scratch) -> bool:
    """Encode ``residual + vector``; the loss becomes the residual.

    Return False at the first bucket whose sum is not finite: its residual and the later ones stay.
    """
    owed, bits, decoded = s.owed, s.bits, s.decoded
    for start in range(0, vector.size, BUCKET):
        count = min(BUCKET, vector.size - start)
        for i in range(count, BUCKET):
            owed[i] = _ZERO
        part, left = vector[start : start + count], residual[start : start + count]
        for i in range(count):
            owed[i] = left[i] + part[i]
        if _greatest(bits) >= _INFINITY:
            return False
        for i in range(count):  # encoding overwrites the sum
            left[i] = owed[i]
        _write(kind, s)
        _put(kind, payload, start, vector.size, s)
        _read(kind, s)
        for i in range(count):
            left[i] -= decoded[i]
    return True


@compiled
def encode_difference(kind: int, base: Any, vector: Any, payload: Any, reached: Any, s: Scratch) -> bool:
    """Encode ``vector - base``, and write the sum of the decoded difference and ``base`` to ``reached``.

    Return False at the first bucket whose difference is not finite.
    """
    owed, bits, decoded = s.owed, s.bits, s.decoded
    for start in range(0, vector.size, BUCKET):
        count = min(BUCKET, vector.size - start)
        for i in range(count, BUCKET):
            owed[i] = _ZERO
        part, before = vector[start : start + count], base[start : start + count]
        after = reached[start : start + count]
        for i in range(count):
            owed[i] = part[i] - before[i]
        if _greatest(bits) >= _INFINITY:
            return False
        _write(kind, s)
        _put(kind, payload, start, vector.size, s)
        _read(kind, s)
        for i in range(count):
            after[i] = decoded[i] + before[i]
    return True


@compiled
def decode(kind: int, payload: Any, out: Any, s: Scratch) -> None:
    """Decode ``payload``, any bytes of the right number, into ``out``, shape ``(n,)`` float32."""
    decoded = s.decoded
    for start in range(0, out.size, BUCKET):
        part = out[start : start + BUCKET]
        _get(kind, payload, start, out.size, s)
        _read(kind, s)
        for i in range(part.size):
            part[i] = decoded[i]


@compiled
def decode_and_add(kind: int, payload: Any, base: Any, out: Any, s: Scratch) -> None:
    """Write the sum of the decoded ``payload`` and ``base`` to ``out``, shape ``(n,)`` float32."""
    decoded = s.decoded
    for start in range(0, out.size, BUCKET):
        part, before = out[start : start + BUCKET], base[start : start + BUCKET]
        _get(kind, payload, start, out.size, s)
        _read(kind, s)
        for i in range(part.size):
            part[i] = decoded[i] + before[i]


@compiled
def is_finite(bits: Any) -> bool:
    """Whether every element of a vector is a number, given its bits, shape ``(n,)`` int32."""
    for start in range(0, bits.size, BUCKET):
        part = bits[start : start + BUCKET]
        greatest = np.int32(0)
        for i in range(part.size):
            greatest = max(greatest, np.int32(part[i] & _MAGNITUDE))
        if greatest >= _INFINITY:
            return False
    return True


@compiled_part
def _greatest(bits: Any) -> Any:
    """Return the bits of the greatest magnitude of a bucket."""
    greatest = np.int32(0)
    for i in range(BUCKET):
        greatest = max(greatest, np.int32(bits[i] & _MAGNITUDE))
    return greatest


# -- where a bucket lies in a payload: the scales of its block, then the levels of its block


@compiled_part
def _places(kind: int, start: int, size: int) -> tuple[int, int, int]:
    """Return where a bucket's scale and levels begin in the payload of ``size`` elements, and the number of levels."""
    count = min(BUCKET, size - start)
    if kind == BF16:
        return 0, 2 * start, 2 * count
    whole, level_bytes = 2 * BUCKET, 2 * count
    if kind == INT8:
        whole, level_bytes = BUCKET, count
    elif kind == INT4:
        whole, level_bytes = BUCKET // 2, (count + 1) // 2
    row, first = start // BUCKET % ROWS, start // (ROWS * BUCKET) * ROWS
    rows = min(ROWS, (size + BUCKET - 1) // BUCKET - first)
    block = first * (4 + whole)
    return block + 4 * row, block + 4 * rows + row * whole, level_bytes


@compiled_part
def _put(kind: int, payload: Any, start: int, size: int, s: Scratch) -> None:
    """Write one bucket to the payload."""
    coded, word_bytes = s.coded, s.word_bytes
    scale, levels, level_bytes = _places(kind, start, size)
    part = payload[levels : levels + level_bytes]
    for i in range(part.size):
        part[i] = coded[i]
    if kind != BF16:
        for i in range(4):  # as bytes, because it need not be aligned
            payload[scale + i] = word_bytes[i]


@compiled_part
def _get(kind: int, payload: Any, start: int, size: int, s: Scratch) -> None:
    """Read one bucket from the payload."""
    coded, word_bytes = s.coded, s.word_bytes
    scale, levels, level_bytes = _places(kind, start, size)
    part = payload[levels : levels + level_bytes]
    for i in range(part.size):
        coded[i] = part[i]
    if kind != BF16:
        for i in range(4):
            word_bytes[i] = payload[scale + i]


# -- one bucket of each format


@compiled_part
def _write(kind: int, s: Scratch) -> None:
    """Write levels and scale of the bucket ``owed``, which is overwritten."""
    bits, coded_int16, owed, coded_int8, coded, pairs = s.bits, s.coded_int16, s.owed, s.coded_int8, s.coded, s.pairs
    if kind == BF16:
        for i in range(BUCKET):
            magnitude = np.int32(bits[i] & _MAGNITUDE)
            odd = np.int32((magnitude >> np.int32(16)) & np.int32(1))
            rounded = min(np.int32(magnitude + odd + np.int32(0x7FFF)), _LARGEST_HALF)
            strange = _INFINITY if magnitude == _INFINITY else _QUIET_NAN
            chosen = rounded if magnitude < _INFINITY else strange
            coded_int16[i] = np.int32(chosen | (bits[i] & _SIGN)) >> np.int32(16)
    elif kind == FP16:
        _write_fp16(s)
    elif kind == INT8:
        inverse = _scale(s, _MOST_8, _LARGEST_8)
        for i in range(BUCKET):
            owed[i] = owed[i] * inverse + _TO_INTEGER
        for i in range(BUCKET):
            coded_int8[i] = bits[i]
    else:
        inverse = _scale(s, _MOST_4, _LARGEST_4)
        for i in range(BUCKET):
            owed[i] = owed[i] * inverse + _TO_INTEGER_8
        for i in range(BUCKET // 2):
            coded[i] = (pairs[i] & np.uint64(15)) | ((pairs[i] >> np.uint64(28)) & np.uint64(0xF0))


@compiled_part
def _write_fp16(s: Scratch) -> None:
    """Write the bucket ``owed`` as halves times a power of two."""
    bits, word_bits, word, owed, coded_int16 = s.bits, s.word_bits, s.word, s.owed, s.coded_int16
    greatest = _greatest(bits)
    exponent = max((greatest >> 23) - 141, -126) if greatest else -15
    word_bits[0] = (127 - exponent) << 23
    inverse = word[0]
    word_bits[0] = (127 + exponent) << 23
    for i in range(BUCKET):  # with the exponent of a half in the lowest five bits, also where halves are subnormal
        scaled = owed[i] * inverse
        scaled = scaled if scaled < _BELOW_2_15 else _BELOW_2_15  # 2**15 could be decoded as infinity
        scaled = scaled if scaled > -_BELOW_2_15 else -_BELOW_2_15
        owed[i] = scaled * _2_M112
    for i in range(BUCKET):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        odd = np.int32((magnitude >> np.int32(13)) & np.int32(1))
        rounded = np.int32(np.int32(magnitude + odd + np.int32(0xFFF)) >> np.int32(13))
        coded_int16[i] = np.int32(rounded | (np.int32(bits[i] & _SIGN) >> np.int32(16)))


@compiled_part
def _scale(s: Scratch, most: Any, largest: Any) -> Any:
    """Write the scale of a bucket of whole numbers up to ``most``; return the factor of its elements."""
    word_bits, bits, word = s.word_bits, s.bits, s.word
    word_bits[0] = _greatest(bits)
    scale = min(word[0] / most, largest)
    if scale < _SMALLEST:  # its inverse would overflow: too small to send
        word[0] = _ZERO
        return _ZERO
    word[0] = scale
    return _ONE / scale


@compiled_part
def _read(kind: int, s: Scratch) -> None:
    """Read a bucket to ``decoded``; a scale from another process may be anything."""
    word, decoded_bits, coded_int16, decoded = s.word, s.decoded_bits, s.coded_int16, s.decoded
    coded_int8, coded = s.coded_int8, s.coded
    scale = word[0]
    if kind == BF16:
        for i in range(BUCKET):
            decoded_bits[i] = np.int32(coded_int16[i]) << np.int32(16)
    elif kind == FP16:
        for i in range(BUCKET):  # the sign, and the half's exponent in the lowest five bits
            decoded_bits[i] = np.int32(np.int32(coded_int16[i]) << np.int32(13)) & np.int32(-0x7000_2000)
        for i in range(BUCKET):
            decoded[i] = decoded[i] * _2_112 * scale
    elif kind == INT8:
        for i in range(BUCKET):
            decoded[i] = np.float32(coded_int8[i]) * scale
    else:
        for i in range(BUCKET // 2):
            decoded[2 * i] = np.float32(np.int32(coded[i] & np.uint8(15)) - np.int32(8)) * scale
            decoded[2 * i + 1] = np.float32(np.int32(coded[i] >> np.uint8(4)) - np.int32(8)) * scale
