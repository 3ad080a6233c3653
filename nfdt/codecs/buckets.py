"""Codecs that give every bucket of 512 elements a scale of its own: small elements survive next to a large bucket.

Layout: the scales of all buckets, float32, then the levels of all elements. A bucket with an element that is not
finite has the scale NaN, and is decoded as NaN. Buckets count from the start of the vector.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nfdt.codecs.base import FLOAT32, Payload, Vector, check_exact

BUCKET = 512
_BLOCK = 128 * BUCKET  # elements handled at once, so that intermediate results stay in cache
_SMALLEST = np.finfo(np.float32).tiny
_LARGEST = np.finfo(np.float32).max
_BELOW_2_15 = np.float32(32752)

Floats = npt.NDArray[np.float32]


class _Bucketed:
    """What the size of a vector says of its payload: ``bits`` per element, and 4 bytes per bucket."""

    name: str
    bits: int

    def encoded_bytes(self, size: int) -> int:
        """See ``Codec``."""
        return _encoded_bytes(size, self.bits)

    def check(self, received_bytes: int, size: int) -> None:
        """See ``Codec``."""
        check_exact(self.name, received_bytes, self.encoded_bytes(size), size)


class Float16(_Bucketed):
    """IEEE half precision of each element divided by a power of two, so that nothing overflows or underflows early.

    The greatest element of a bucket is brought to ``[2**14, 2**15)``. The error of an element is at most ``2**-11``
    of it, or ``2**-39`` of the bucket's greatest.
    """

    name = "fp16"
    bits = 16

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        payload, scales, levels = _empty(vector.size, self.bits)
        for part, buckets in _blocks(vector.size):
            values, greatest = _measured(vector[part])
            _, exponents = np.frexp(np.where(np.isfinite(greatest), greatest, 0))
            exponents = np.maximum(exponents - 15, -126)
            scaled = values * _spread(np.ldexp(np.float32(1), -exponents), values.size)
            np.clip(scaled, -_BELOW_2_15, _BELOW_2_15, out=scaled)  # 2**15 could be decoded as infinity
            levels[2 * part.start : 2 * part.stop] = scaled.astype("<f2").view(np.uint8)
            scales[buckets] = np.where(np.isfinite(greatest), np.ldexp(np.float32(1), exponents), np.nan)
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        scales, levels = _areas(payload, out.size)
        halves = levels.view("<f2")
        for part, buckets in _blocks(out.size):
            _multiply(halves[part].astype(np.float32), scales[buckets], out[part])


class Int8(_Bucketed):
    """255 levels: integers from -127 to 127 times a 127th of the bucket's greatest element.

    The error of an element is at most half a step: a 254th of the bucket's greatest, and never more than the element.
    """

    name = "int8"
    bits = 8

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        payload, scales, levels = _empty(vector.size, self.bits)
        for part, buckets in _blocks(vector.size):
            rounded, scales[buckets] = _rounded(vector[part], 127)
            levels[part] = rounded.astype(np.int8).view(np.uint8)
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        scales, levels = _areas(payload, out.size)
        for part, buckets in _blocks(out.size):
            _multiply(levels[part].view(np.int8).astype(np.float32), scales[buckets], out[part])


class Int4(_Bucketed):
    """15 levels, two elements to a byte, the first one in its lower half: integers from -7 to 7, plus 8.

    The error of an element is at most half a step: a 14th of the bucket's greatest, and never more than the element.
    """

    name = "int4"
    bits = 4

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        payload, scales, levels = _empty(vector.size, self.bits)
        for part, buckets in _blocks(vector.size):
            rounded, scales[buckets] = _rounded(vector[part], 7)
            nibbles = np.zeros(rounded.size + rounded.size % 2, np.uint8)
            nibbles[: rounded.size] = (rounded + 8).astype(np.uint8)
            levels[part.start // 2 : (part.stop + 1) // 2] = nibbles[0::2] | (nibbles[1::2] << 4)
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        scales, levels = _areas(payload, out.size)
        for part, buckets in _blocks(out.size):
            packed = levels[part.start // 2 : (part.stop + 1) // 2]
            values = np.empty(2 * packed.size, np.float32)
            values[0::2] = packed & 15
            values[1::2] = packed >> 4
            values = values[: part.stop - part.start]
            values -= 8
            _multiply(values, scales[buckets], out[part])


def _count(size: int) -> int:
    return -(-size // BUCKET)


def _encoded_bytes(size: int, bits: int) -> int:
    return 4 * _count(size) + -(-size * bits // 8)


def _empty(size: int, bits: int) -> tuple[Payload, Floats, Payload]:
    payload = np.empty(_encoded_bytes(size, bits), np.uint8)
    return payload, *_areas(payload, size)


def _areas(payload: Payload, size: int) -> tuple[Floats, Payload]:
    """Scales and levels."""
    border = 4 * _count(size)
    return payload[:border].view(FLOAT32), payload[border:]


def _blocks(size: int) -> list[tuple[slice, slice]]:
    """Ranges of elements, and the ranges of their buckets."""
    parts = [slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]
    return [(part, slice(part.start // BUCKET, _count(part.stop))) for part in parts]


def _spread(per_bucket: Floats, size: int) -> Floats:
    """Each bucket's value for each of its elements."""
    return np.repeat(per_bucket, BUCKET)[:size]


def _multiply(levels: Floats, scales: Floats, out: Floats) -> None:
    """Levels times their bucket's scale; scales from another process may be anything."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(levels, _spread(scales, levels.size), out=out)


def _measured(values: Floats) -> tuple[Floats, Floats]:
    """The elements, zero in buckets that are not finite, and the greatest magnitude of every bucket."""
    greatest = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BUCKET))
    finite = np.isfinite(greatest)
    if not finite.all():
        values = np.where(_spread(finite, values.size), values, np.float32(0))
    return values, greatest


def _rounded(values: Floats, most: int) -> tuple[Floats, Floats]:
    """Whole numbers from ``-most`` to ``most``, and the scales that make them values again."""
    values, greatest = _measured(values)
    scales = np.minimum(greatest / np.float32(most), np.nextafter(_LARGEST / np.float32(most), np.float32(0)))
    scales[scales < _SMALLEST] = 0  # its inverse would overflow: too small to send
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    scales[~np.isfinite(greatest)] = np.nan
    return np.rint(values * _spread(inverse, values.size)), scales
