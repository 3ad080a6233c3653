"""Codecs with a fixed number of bits per element: float32, bfloat16, and those with a scale per bucket.

A bucket is 512 elements, so that small elements survive next to a large bucket. Layout of each block of 64 buckets:
their scales, float32, then the levels of their elements. A bucket with an element that is not finite has the scale NaN,
and is decoded as NaN. Buckets are counted from the start of the vector.
"""

from __future__ import annotations

import numpy as np

from nfdt.codecs.base import FLOAT32, Codec, Payload, Vector
from nfdt.codecs.blocks import BLOCK, BUCKET
from nfdt.codecs.fused import FusedCodec


class IdentityCodec(Codec):
    """Float32, little-endian: lossless; the encoding is a view of the vector."""

    name = "identity"
    block = BLOCK

    def encoded_bytes(self, size: int) -> int:
        """Return 4 bytes per element."""
        return 4 * size

    def encode(self, vector: Vector) -> Payload:
        """Return a view of the vector's own memory."""
        return np.ascontiguousarray(vector, FLOAT32).view(np.uint8)

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        out[:] = payload.view(FLOAT32)


class BFloat16(FusedCodec):
    """Sign, exponent and 7 bits of the fraction: the range of float32 at half its size.

    Rounding is to the nearest, ties to even; the error of an element is at most ``2**-8`` of it. A number that would
    round to infinity becomes the largest finite one.
    """

    name = "bf16"

    def encoded_bytes(self, size: int) -> int:
        """Return 2 bytes per element."""
        return 2 * size


class _Bucketed(FusedCodec):
    """``bits`` per element, and 4 bytes per bucket."""

    bits: int

    def encoded_bytes(self, size: int) -> int:
        """See ``Codec``."""
        return 4 * -(-size // BUCKET) + -(-size * self.bits // 8)


class Float16(_Bucketed):
    """IEEE half precision of each element divided by a power of two, which avoids early overflow and underflow.

    The greatest element of a bucket is scaled to ``[2**14, 2**15)``. The error of an element is at most ``2**-11``
    of it, or ``2**-39`` of the bucket's greatest.
    """

    name = "fp16"
    bits = 16


class Int8(_Bucketed):
    """255 levels: integers from -127 to 127 times 1/127 of the bucket's greatest element.

    The error of an element is at most half a step, 1/254 of the bucket's greatest, and never more than the element.
    """

    name = "int8"
    bits = 8


class Int4(_Bucketed):
    """15 levels, two elements per byte, the first one in its lower half: integers from -7 to 7, plus 8.

    The error of an element is at most half a step, 1/14 of the bucket's greatest, and never more than the element.
    """

    name = "int4"
    bits = 4
