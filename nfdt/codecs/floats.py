"""Floating-point codecs: the unchanged vector, and the upper half of every float32 (bfloat16)."""

from __future__ import annotations

import numpy as np

from nfdt.codecs.base import FLOAT32, Payload, Vector, check_exact
from nfdt.codecs.blocks import BLOCK
from nfdt.codecs.fused import FusedCodec


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


class BFloat16(FusedCodec):
    """Sign, exponent and 7 bits of the fraction: the range of float32 at half its size.

    Rounding is to the nearest, ties to even; the error of an element is at most ``2**-8`` of it. A number that would
    round to infinity becomes the largest finite one.
    """

    name = "bf16"

    def encoded_bytes(self, size: int) -> int:
        """Return 2 bytes per element."""
        return 2 * size
