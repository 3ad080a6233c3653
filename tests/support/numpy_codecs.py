"""NumPy form of the compiled codecs, the reference of their bits.

Layout of each block of 64 buckets: their scales, float32, then the levels of their elements. A bucket with an element
that is not finite has the scale NaN, and is decoded as NaN. Buckets are counted from the start of the vector.

A block is processed with one bucket per row, in memory that stays in cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.codecs.base import BUCKET, FLOAT32, Codec, Payload, Vector

BLOCK = 2**15

_SIGN = np.uint32(0x8000_0000)
_INFINITY = np.uint32(0x7F80_0000)
_LARGEST_HALF = np.uint32(0x7F7F_0000)  # largest finite bfloat16
_QUIET_NAN = np.uint32(0x7FC0_0000)

_ROWS = 64  # buckets per block
_SMALLEST = np.finfo(np.float32).tiny
_LARGEST = np.finfo(np.float32).max
_BELOW_2_15 = np.float32(32752)
_TO_INTEGER = np.float32(3 * 2**22)
"""Added to a small number, it leaves the nearest whole number, ties to even, in the lowest bits."""

Floats = npt.NDArray[np.float32]
BucketRows = npt.NDArray[np.float32]
"""Shape ``(buckets, 512)``."""


class _Bucketed(Codec):
    """Encoding and decoding block by block; ``bits`` per element, and 4 bytes per bucket."""

    name: str
    bits: int
    block = _ROWS * BUCKET

    def encoded_bytes(self, size: int) -> int:
        """See ``Codec``."""
        return 4 * _count(size) + -(-size * self.bits // 8)

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        payload = np.empty(self.encoded_bytes(vector.size), np.uint8)
        scratch = np.empty((2, min(_ROWS, _count(vector.size)), BUCKET), np.float32)
        for part, coded in self.blocks(vector.size):
            self._encode_block(vector[part], payload[coded], scratch)
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        for part, coded in self.blocks(out.size):
            self._decode_block(payload[coded], out[part])

    def _encode_block(self, vector: Vector, payload: Payload, scratch: Any) -> None:
        scales, levels = _areas(payload, vector.size)
        rows = _rows(vector, scratch[0])
        work = scratch[1, : len(rows)]
        greatest = np.abs(rows, out=work).max(1)
        finite = np.isfinite(greatest)
        if not finite.all():
            rows = np.where(finite[:, None], rows, np.float32(0))
            greatest[~finite] = 0
        scales[:], inverse = self._scales(greatest)
        scales[~finite] = np.nan
        self._write(np.multiply(rows, inverse[:, None], out=work), levels)

    def _decode_block(self, payload: Payload, out: Vector) -> None:
        scales, levels = _areas(payload, out.size)
        whole = out.size % BUCKET == 0
        rows = out.reshape(-1, BUCKET) if whole else np.empty((_count(out.size), BUCKET), np.float32)
        self._read(levels, rows.reshape(-1)[: out.size])
        with np.errstate(over="ignore", invalid="ignore"):  # scales from another process may be anything
            np.multiply(rows, scales[:, None], out=rows)
        if not whole:
            out[:] = rows.reshape(-1)[: out.size]

    def _scales(self, greatest: Floats) -> tuple[Floats, Floats]:
        """Return each bucket's scale and the factor of its elements, from its greatest magnitude."""
        raise NotImplementedError

    def _write(self, rows: BucketRows, levels: Payload) -> None:
        """Write scaled elements as levels; ``rows`` may be overwritten, and may have more elements than levels."""
        raise NotImplementedError

    def _read(self, levels: Payload, values: Floats) -> None:
        """Read levels as numbers to multiply with the scale."""
        raise NotImplementedError


class Float16(_Bucketed):
    """IEEE half precision of each element divided by a power of two, which avoids early overflow and underflow.

    The greatest element of a bucket is scaled to ``[2**14, 2**15)``. The error of an element is at most ``2**-11``
    of it, or ``2**-39`` of the bucket's greatest.
    """

    name = "fp16"
    bits = 16

    def _scales(self, greatest: Floats) -> tuple[Floats, Floats]:
        exponents = np.maximum(np.frexp(greatest)[1] - 15, -126)
        return np.ldexp(np.float32(1), exponents), np.ldexp(np.float32(1), -exponents)

    def _write(self, rows: BucketRows, levels: Payload) -> None:
        np.clip(rows, -_BELOW_2_15, _BELOW_2_15, out=rows)  # 2**15 could be decoded as infinity
        # With the exponent of a half in its lowest five bits, subnormal halves are subnormal here as well.
        bits = np.multiply(rows, np.float32(2.0**-112), out=rows).reshape(-1).view(np.uint32)[: levels.size // 2]
        rounded = np.right_shift(bits, 13)
        rounded &= 1
        rounded += 0xFFF
        rounded += bits
        rounded >>= 13
        sign = np.right_shift(rounded, 3, out=bits)
        sign &= 0x8000
        rounded &= 0x7FFF
        rounded |= sign
        np.copyto(levels.view("<u2"), rounded)

    def _read(self, levels: Payload, values: Floats) -> None:
        bits = values.view(np.int32)
        np.copyto(bits, levels.view("<i2"))
        bits <<= 13
        bits &= -0x7000_2000  # the sign, and the half's exponent in the lowest five bits
        values *= np.float32(2.0**112)


class _Levels(_Bucketed):
    """Whole numbers from ``-most`` to ``most`` times a scale; the error of an element is at most half a step."""

    most: int

    def _scales(self, greatest: Floats) -> tuple[Floats, Floats]:
        most = np.float32(self.most)
        scales = np.minimum(greatest / most, np.nextafter(_LARGEST / most, np.float32(0)))
        scales[scales < _SMALLEST] = 0  # its inverse would overflow: too small to send
        return scales, np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


class Int8(_Levels):
    """255 levels: integers from -127 to 127 times 1/127 of the bucket's greatest element.

    The error of an element is at most half a step, 1/254 of the bucket's greatest, and never more than the element.
    """

    name = "int8"
    bits = 8
    most = 127

    def _write(self, rows: BucketRows, levels: Payload) -> None:
        rows += _TO_INTEGER
        np.copyto(levels, rows.reshape(-1).view(np.uint32)[: levels.size])

    def _read(self, levels: Payload, values: Floats) -> None:
        np.copyto(values, levels.view(np.int8))


class Int4(_Levels):
    """15 levels, two elements per byte, the first one in its lower half: integers from -7 to 7, plus 8.

    The error of an element is at most half a step, 1/14 of the bucket's greatest, and never more than the element.
    """

    name = "int4"
    bits = 4
    most = 7

    def _write(self, rows: BucketRows, levels: Payload) -> None:
        rows += _TO_INTEGER + np.float32(8)
        nibbles = rows.reshape(-1).view(np.uint32)[: 2 * levels.size].astype(np.uint8)
        pairs = nibbles.view("<u2")
        np.copyto(levels, pairs | pairs >> 4)

    def _read(self, levels: Payload, values: Floats) -> None:
        pairs = levels.astype("<u2")
        pairs |= pairs << 4
        pairs &= 0x0F0F
        np.copyto(values, pairs.view(np.uint8)[: values.size])
        values -= 8


def _count(size: int) -> int:
    return -(-size // BUCKET)


def _areas(payload: Payload, size: int) -> tuple[Floats, Payload]:
    """Return scales and levels."""
    border = 4 * _count(size)
    return payload[:border].view(FLOAT32), payload[border:]


def _rows(values: Vector, scratch: Any) -> BucketRows:
    """Return one row per bucket, the last one filled up with zeros in ``scratch``."""
    if values.size % BUCKET == 0:
        return values.reshape(-1, BUCKET)
    rows: BucketRows = scratch[: _count(values.size)]
    flat = rows.reshape(-1)
    flat[: values.size] = values
    flat[values.size :] = 0
    return rows


class BFloat16(Codec):
    """Sign, exponent and 7 bits of the fraction: the range of float32 at half its size.

    Rounding is to the nearest, ties to even; the error of an element is at most ``2**-8`` of it. A number that would
    round to infinity becomes the largest finite one.
    """

    name = "bf16"
    block = BLOCK

    def encoded_bytes(self, size: int) -> int:
        """Return 2 bytes per element."""
        return 2 * size

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        payload = np.empty(self.encoded_bytes(vector.size), np.uint8)
        halves = payload.view("<u2")
        bits = np.ascontiguousarray(vector, FLOAT32).view("<u4")
        halves[:] = _upper_halves(bits)
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        halves, bits = payload.view("<u2"), out.view("<u4")
        for start in range(0, out.size, BLOCK):
            part = slice(start, start + BLOCK)
            np.copyto(bits[part], halves[part])
            bits[part] <<= 16


def _upper_halves(bits: Any) -> Any:
    """Round any numbers."""
    magnitude = bits & ~_SIGN
    odd = (magnitude >> np.uint32(16)) & np.uint32(1)
    rounded = np.where(
        magnitude < _INFINITY, np.minimum(magnitude + (np.uint32(0x7FFF) + odd), _LARGEST_HALF), magnitude
    )
    np.copyto(rounded, _QUIET_NAN, where=magnitude > _INFINITY)
    return (rounded | (bits & _SIGN)) >> np.uint32(16)


NUMPY_CODECS: dict[str, Any] = {codec.name: codec for codec in (BFloat16(), Float16(), Int8(), Int4())}
