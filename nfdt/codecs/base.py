"""The interface of a codec, which encodes a float32 vector as fewer bytes.

Every codec but the identity is lossy, and every one is a *contraction*: ``|x - decode(encode(x))| <= |x|``, strictly
less unless ``x`` is zero. Error feedback requires this property, not unbiasedness, to lose nothing in the long run.
Rounding is therefore to the nearest level, which halves the error of stochastic rounding and needs no random numbers.
See :mod:`nfdt.codecs.error_feedback`.

Encoding and decoding are deterministic and use single IEEE operations only: both ends of a link compute the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ShapeMismatch

Vector = npt.NDArray[np.float32]
Payload = npt.NDArray[np.uint8]

FLOAT32 = np.dtype("<f4")


class Codec(ABC):
    """Encoding of flat vectors; stateless, so one object serves any number of threads.

    Attributes:
        name: Name in the option ``codec`` and in a frame's header.
        block: Block size in elements; blocks are encoded independently, and the payload of a vector is the
            concatenation of theirs. 0: the vector is encoded as a whole.
    """

    name: str
    block: int

    @abstractmethod
    def encoded_bytes(self, size: int) -> int:
        """Return the number of bytes of ``size`` encoded elements."""

    def check(self, received_bytes: int, size: int) -> None:
        """Check, before memory is allocated, that this number of bytes can hold ``size`` elements.

        Raises:
            ShapeMismatch: It cannot.
        """
        if received_bytes != self.encoded_bytes(size):
            raise ShapeMismatch(
                f"Payload in codec {self.name}: expected {self.encoded_bytes(size)} bytes ({size} elements). "
                f"Received: {received_bytes} bytes. The sender has another model; restart it."
            )

    @abstractmethod
    def encode(self, vector: Vector) -> Payload:
        """Encode ``vector``, shape ``(n,)`` float32, as bytes, shape ``(encoded_bytes(n),)`` uint8.

        A vector with elements that are not finite is decoded to a vector with such elements.
        """

    @abstractmethod
    def decode(self, payload: Payload, out: Vector) -> None:
        """Decode ``payload`` into ``out``, shape ``(n,)`` float32.

        Args:
            payload: Bytes from another process, of a length that :meth:`check` allows for ``n`` elements. If the
                sender can still write to their memory, a change affects values, never the number of elements.
            out: Vector that is overwritten; its content is undefined after an error.

        Raises:
            ProtocolError: The bytes are no valid payload.
        """


def relative_error(vector: Vector, decoded: Vector) -> float:
    """Return omega, ``|decoded - vector|^2 / |vector|^2``; 0 for a zero vector, NaN if not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.dot(vector, vector))
        lost = decoded - vector
        return float(np.dot(lost, lost)) / norm if norm else 0.0
