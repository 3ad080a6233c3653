"""Codecs that encode and decode in compiled loops, together with what comes before and after; see :mod:`.kernels`.

The loops are imported where a vector is first encoded or decoded: a program without codecs does not import Numba.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from nfdt.codecs.base import FLOAT32, Codec, Payload, Vector
from nfdt.codecs.blocks import BLOCK, blocks, make_scratch
from nfdt.core.errors import ShapeMismatch


class FusedCodec(Codec):
    """Codec in compiled loops: ``name`` is that of a format of :mod:`nfdt.codecs.kernels`."""

    block = BLOCK

    def encode(self, vector: Vector) -> Payload:
        """See ``Codec``."""
        loops, payload = _loops(), np.empty(self.encoded_bytes(vector.size), np.uint8)
        loops.encode(loops.KINDS[self.name], _read_only(vector), payload, make_scratch())
        return payload

    def decode(self, payload: Payload, out: Vector) -> None:
        """See ``Codec``.

        Raises:
            ShapeMismatch: The payload has another size; loops do not check each place.
        """
        self.check(payload.size, out.size)
        loops = _loops()
        loops.decode(loops.KINDS[self.name], _bytes(payload), out, make_scratch())

    def encode_owed(self, vector: Vector, residual: Vector, payload: Payload) -> bool:
        """See :func:`encode_owed`."""
        self._check_all(payload, vector, residual)
        loops = _loops()
        kind = loops.KINDS[self.name]
        return bool(loops.encode_owed(kind, _read_only(vector), residual, payload, make_scratch()))

    def encode_difference(self, base: Vector, vector: Vector, payload: Payload, reached: Vector) -> bool:
        """See :func:`encode_difference`."""
        self._check_all(payload, base, vector, reached)
        loops = _loops()
        vectors = (_read_only(base), _read_only(vector), payload, reached)
        return bool(loops.encode_difference(loops.KINDS[self.name], *vectors, make_scratch()))

    def decode_and_add(self, payload: Payload, base: Vector, out: Vector) -> None:
        """See :func:`decode_and_add`."""
        self._check_all(payload, base, out)
        loops = _loops()
        loops.decode_and_add(loops.KINDS[self.name], _bytes(payload), _read_only(base), out, make_scratch())

    def _check_all(self, payload: Payload, *vectors: Vector) -> None:
        sizes = {vector.size for vector in vectors}
        if len(sizes) > 1:
            raise ShapeMismatch(f"Codec {self.name}: expected vectors of one size. Received: {sorted(sizes)}.")
        self.check(payload.size, sizes.pop())


def is_finite(vector: Vector) -> bool:
    """Whether every element is a number."""
    return bool(_loops().is_finite(_read_only(vector).view(np.int32)))


def encode_owed(codec: Codec, vector: Vector, residual: Vector, payload: Payload) -> bool:
    """Encode the sum of two vectors; its loss becomes the residual.

    Args:
        codec: Any codec.
        vector: Shape ``(n,)`` float32.
        residual: Same shape; it is overwritten.
        payload: Shape ``(codec.encoded_bytes(n),)`` uint8; it is overwritten.

    Returns:
        Whether the sum is finite. If it is not, the residual of some elements is the one after sending them.
    """
    if isinstance(codec, FusedCodec):
        return codec.encode_owed(vector, residual, payload)
    scratch = np.empty((2, min(codec.block or vector.size, vector.size)), np.float32)
    for part, coded in blocks(codec, vector.size):
        owed, decoded = scratch[:, : part.stop - part.start]
        with np.errstate(over="ignore"):
            np.add(residual[part], vector[part], out=owed)
        if not is_finite(owed):
            return False
        payload[coded] = codec.encode(owed)
        codec.decode(payload[coded], decoded)
        np.subtract(owed, decoded, out=residual[part])
    return True


def encode_difference(codec: Codec, base: Vector, vector: Vector, payload: Payload, reached: Vector) -> bool:
    """Encode ``vector - base``, and compute the sum of ``base`` and the decoded difference.

    Args:
        codec: Any codec.
        base: Shape ``(n,)`` float32.
        vector: Same shape.
        payload: Shape ``(codec.encoded_bytes(n),)`` uint8; it is overwritten.
        reached: Shape ``(n,)`` float32; overwritten by the sum.

    Returns:
        Whether the difference is finite. If it is not, payload and sum are incomplete.
    """
    if isinstance(codec, FusedCodec):
        return codec.encode_difference(base, vector, payload, reached)
    for part, coded in blocks(codec, base.size):
        block = reached[part]
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(vector[part], base[part], out=block)
        if not is_finite(block):
            return False
        payload[coded] = codec.encode(block)
        codec.decode(payload[coded], block)
        block += base[part]
    return True


def decode_and_add(codec: Codec, payload: Payload, base: Vector, out: Vector) -> None:
    """Write the sum of a decoded payload and ``base`` to ``out``, both of shape ``(n,)`` float32.

    Raises:
        ProtocolError: The bytes are no valid payload.
    """
    if isinstance(codec, FusedCodec):
        codec.decode_and_add(payload, base, out)
        return
    for part, coded in blocks(codec, out.size):
        codec.decode(payload[coded], out[part])
        out[part] += base[part]


def _loops() -> ModuleType:
    from nfdt.codecs import kernels

    return kernels


def _read_only(vector: Vector) -> Any:
    """Return a view of a vector, or an aligned copy: loops are compiled once for each kind of array."""
    view = np.require(vector, FLOAT32, ["C", "A"]).view()
    view.flags.writeable = False
    return view


def _bytes(payload: Payload) -> Any:
    view = np.ascontiguousarray(payload).view()
    view.flags.writeable = False
    return view
