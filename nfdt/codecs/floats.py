"""Floating-point codecs: the unchanged vector, and the upper half of every float32 (bfloat16)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nfdt.codecs.base import FLOAT32, Payload, Vector, check_exact

Bits = npt.NDArray[np.uint32]

BLOCK = 2**15  # elements processed at once, so that intermediate results stay in cache

_SIGN = np.uint32(0x8000_0000)
_INFINITY = np.uint32(0x7F80_0000)
_LARGEST = np.uint32(0x7F7F_0000)  # largest finite bfloat16
_ROUNDS_DOWN = np.float32(3e38)  # smaller numbers never round to infinity
_QUIET_NAN = np.uint32(0x7FC0_0000)


class IdentityCodec:
    """Float32, little-endian: lossless; the encoding is a view of the vector."""

    name = "identity"
    block = BLOCK

    def encoded_bytes(self, size: int) -> int:
        """Return 4 bytes per element."""
        return 4 * size

    def check(self, received_bytes: int, size: int) -> None:
        """See ``Codec``."""
        check_exact(self.name, received_bytes, self.encoded_bytes(size), size)

    def encode(self, vector: Vector) -> Payload:
        """Return a view of the vector's own memory."""
        return np.ascontiguousarray(vector, FLOAT32).view(np.uint8)

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        out[:] = payload.view(FLOAT32)


class BFloat16:
    """Sign, exponent and 7 bits of the fraction: the range of float32 at half its size.

    Rounding is to the nearest, ties to even; the error of an element is at most ``2**-8`` of it. A number that would
    round to infinity becomes the largest finite one.
    """

    name = "bf16"
    block = BLOCK

    def encoded_bytes(self, size: int) -> int:
        """Return 2 bytes per element."""
        return 2 * size

    def check(self, received_bytes: int, size: int) -> None:
        """See ``Codec``."""
        check_exact(self.name, received_bytes, self.encoded_bytes(size), size)

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        payload = np.empty(self.encoded_bytes(vector.size), np.uint8)
        halves = payload.view("<u2")
        bits = np.ascontiguousarray(vector, FLOAT32).view("<u4")
        scratch = np.empty(min(BLOCK, vector.size), np.uint32)
        for start in range(0, vector.size, BLOCK):
            part = slice(start, start + BLOCK)
            block = vector[part]
            if -_ROUNDS_DOWN < block.min() and block.max() < _ROUNDS_DOWN:  # false for NaN
                np.copyto(halves[part], _nearest_halves(bits[part], scratch[: block.size]))
            else:
                halves[part] = _upper_halves(bits[part])
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``."""
        halves, bits = payload.view("<u2"), out.view("<u4")
        for start in range(0, out.size, BLOCK):
            part = slice(start, start + BLOCK)
            np.copyto(bits[part], halves[part])
            bits[part] <<= 16


def _nearest_halves(bits: Bits, out: Bits) -> Bits:
    """Round numbers that are also finite in bfloat16."""
    np.right_shift(bits, 16, out=out)
    out &= 1
    out += 0x7FFF
    out += bits
    out >>= 16
    return out


def _upper_halves(bits: Bits) -> Bits:
    """Round any numbers."""
    magnitude = bits & ~_SIGN
    odd = (magnitude >> np.uint32(16)) & np.uint32(1)
    rounded = np.where(magnitude < _INFINITY, np.minimum(magnitude + (np.uint32(0x7FFF) + odd), _LARGEST), magnitude)
    np.copyto(rounded, _QUIET_NAN, where=magnitude > _INFINITY)
    return (rounded | (bits & _SIGN)) >> np.uint32(16)
