"""Error feedback: the loss of a codec is added to the next vector, so that no loss is final (Seide et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nfdt.codecs.base import Codec, Payload, Vector
from nfdt.codecs.fused import encode_owed
from nfdt.codecs.widths import IdentityCodec


class ErrorFeedback:
    """The running difference between the inputs and the vectors that were sent.

    With ``e`` the residual, ``C`` the codec and ``g`` the next vector::

        owed = e + g        send C(owed)        e = owed - C(owed)

    so that at any moment: sum of decoded vectors + residual = sum of inputs, up to float32 rounding. As every codec is
    a contraction, the residual stays bounded by the size of the inputs.

    Args:
        size: Number of elements of the vectors.
    """

    def __init__(self, size: int) -> None:
        self._residual = np.zeros(size, np.float32)
        self._settled = True

    @property
    def residual(self) -> Vector:
        """The part that has not been sent, shape ``(size,)``; a view that the next call changes."""
        return self._residual

    def encode(self, codec: Codec, vector: Vector, bounds: Sequence[slice]) -> list[Payload] | None:
        """Encode the sum of ``vector`` and the residual, part by part; the loss becomes the residual.

        Args:
            codec: Codec of this vector; it may change with every call.
            vector: Vector of shape ``(size,)``, finite.
            bounds: Ranges of the parts.

        Returns:
            A payload per part; views of ``vector`` if the codec is lossless and the residual is zero. None if the sum
            overflows: the residual of the earlier parts is then the one after sending them.
        """
        if isinstance(codec, IdentityCodec):
            exact = vector if self._settled else vector + self._residual
            self._residual[:] = 0
            self._settled = True
            return [codec.encode(exact[bound]) for bound in bounds]
        self._settled = False
        payloads = []
        for bound in bounds:
            payload = _encode(codec, vector[bound], self._residual[bound])
            if payload is None:
                return None
            payloads.append(payload)
        return payloads


def _encode(codec: Codec, vector: Vector, residual: Vector) -> Payload | None:
    payload = np.empty(codec.encoded_bytes(vector.size), np.uint8)
    return payload if encode_owed(codec, vector, residual, payload) else None
