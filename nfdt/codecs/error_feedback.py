"""What a codec loses is added to what is sent next, so that nothing is lost for good (Seide et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nfdt.codecs.base import Codec, Payload, Vector
from nfdt.codecs.blocks import blocks, is_finite
from nfdt.codecs.floats import IdentityCodec


class ErrorFeedback:
    """The running difference between what should have been sent and what was.

    With ``e`` the residual, ``C`` the codec and ``g`` the next vector::

        owed = e + g        send C(owed)        e = owed - C(owed)

    so that at any moment: sum of decoded vectors + residual = sum of inputs, up to float32 rounding. As every codec is
    a contraction, the residual stays bounded by the size of the inputs.

    Args:
        size: Elements of the vectors.
    """

    def __init__(self, size: int) -> None:
        self._residual = np.zeros(size, np.float32)
        self._settled = True

    @property
    def residual(self) -> Vector:
        """What has not been sent, shape ``(size,)``; a view that the next call changes."""
        return self._residual

    def encode(self, codec: Codec, vector: Vector, bounds: Sequence[slice]) -> list[Payload] | None:
        """What should be sent now, ``vector`` and the residual, part by part; what is lost becomes the residual.

        Args:
            codec: Another one may be used every time.
            vector: Shape ``(size,)``, finite.
            bounds: The parts' elements.

        Returns:
            A payload per part; where nothing is lost or owed, views of ``vector``. None where the sum overflows: the
            residual of what was encoded before that is as if it had been sent.
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
    scratch = np.empty((2, min(codec.block or vector.size, vector.size)), np.float32)
    for part, coded in blocks(codec, vector.size):
        owed, decoded = scratch[:, : part.stop - part.start]
        with np.errstate(over="ignore"):
            np.add(residual[part], vector[part], out=owed)
        if not is_finite(owed):
            return None
        payload[coded] = codec.encode(owed)
        codec.decode(payload[coded], decoded)
        np.subtract(owed, decoded, out=residual[part])
    return payload
