"""Codecs with a fixed number of bits per element: bfloat16, and those with a scale per bucket.

A bucket is 512 elements, so that small elements survive next to a large bucket. Layout of each block of 64 buckets:
their scales, float32, then the levels of their elements. A bucket with an element that is not finite has the scale NaN,
and is decoded as NaN. Buckets are counted from the start of the vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nfdt.codecs.base import BLOCK, BUCKET, FLOAT32, Codec, Payload, Vector
from nfdt.core.errors import ShapeMismatch


class FusedCodec(Codec):
    """Codec in compiled loops, each of which does an operation in one pass over the vectors.

    ``name`` is that of a format of :mod:`nfdt.codecs.kernels`.
    """

    block = BLOCK

    def encode(self, vector: Vector) -> Payload:
        """Encode the vector in one pass."""
        payload = np.empty(self.encoded_bytes(vector.size), np.uint8)
        self._run("encode", _read_only(vector), payload)
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """Decode in one pass.

        Raises:
            ShapeMismatch: The payload has another size; loops do not check each place.
        """
        self._check_sizes(payload, out)
        self._run("decode", _bytes(payload), out)

    def encode_owed(self, vector: Vector, residual: Vector, payload: Payload) -> bool:
        """Add, encode and compute the loss in one pass."""
        self._check_sizes(payload, vector, residual)
        return bool(self._run("encode_owed", _read_only(vector), residual, payload))

    def encode_difference(self, base: Vector, vector: Vector, payload: Payload, reached: Vector) -> bool:
        """Subtract, encode and compute the sum in one pass."""
        self._check_sizes(payload, base, vector, reached)
        return bool(self._run("encode_difference", _read_only(base), _read_only(vector), payload, reached))

    def decode_and_add(self, payload: Payload, base: Vector, out: Vector) -> None:
        """Decode and add in one pass."""
        self._check_sizes(payload, base, out)
        self._run("decode_and_add", _bytes(payload), _read_only(base), out)

    def _run(self, loop: str, *arrays: Any) -> Any:
        from nfdt.codecs import kernels  # here, as a program without codecs need not import Numba

        return getattr(kernels, loop)(kernels.KINDS[self.name], *arrays, kernels.make_scratch())

    def _check_sizes(self, payload: Payload, *vectors: Vector) -> None:
        sizes = {vector.size for vector in vectors}
        if len(sizes) > 1:
            raise ShapeMismatch(f"Codec {self.name}: expected vectors of one size. Received: {sorted(sizes)}.")
        self.check(payload.size, sizes.pop())


def is_finite(vector: Vector) -> bool:
    """Whether every element is a number."""
    from nfdt.codecs import kernels  # here, as a program without codecs need not import Numba

    return bool(kernels.is_finite(_read_only(vector).view(np.int32)))


def _read_only(vector: Vector) -> Any:
    """Return a read-only view of a vector, or an aligned copy: loops are compiled once for each kind of array."""
    view = np.require(vector, FLOAT32, ["C", "A"]).view()
    view.flags.writeable = False
    return view


def _bytes(payload: Payload) -> Any:
    view = np.ascontiguousarray(payload).view()
    view.flags.writeable = False
    return view


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
        """Return the bytes of scales and levels."""
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
