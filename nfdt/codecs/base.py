"""Codecs encode a float32 vector as fewer bytes, and error feedback sends later what a codec loses.

Every codec but the identity is lossy, and every one is a *contraction*: ``|x - decode(encode(x))| <= |x|``, strictly
less unless ``x`` is zero. Error feedback requires this property, not unbiasedness, to lose nothing in the long run.
Rounding is therefore to the nearest level, which halves the error of stochastic rounding and needs no random numbers.

Encoding and decoding are deterministic and use single IEEE operations only: both ends of a link compute the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ShapeMismatch

Vector = npt.NDArray[np.float32]
Payload = npt.NDArray[np.uint8]

FLOAT32 = np.dtype("<f4")

BUCKET = 512
"""Elements that share a scale."""
BLOCK = 64 * BUCKET
"""Elements that are encoded independently of others, by codecs other than ``top-k``. A block stays in cache."""


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

    def encode_owed(self, vector: Vector, residual: Vector, payload: Payload) -> bool:
        """Encode the sum of two vectors; its loss becomes the residual.

        Args:
            vector: Shape ``(n,)`` float32.
            residual: Same shape; it is overwritten.
            payload: Shape ``(encoded_bytes(n),)`` uint8; it is overwritten.

        Returns:
            Whether the sum is finite. If it is not, the residual of some elements is the one after sending them.
        """
        scratch = np.empty((2, min(self.block or vector.size, vector.size)), np.float32)
        for part, coded in self.blocks(vector.size):
            owed, decoded = scratch[:, : part.stop - part.start]
            with np.errstate(over="ignore"):
                np.add(residual[part], vector[part], out=owed)
            if not np.isfinite(owed).all():
                return False
            payload[coded] = self.encode(owed)
            self.decode(payload[coded], decoded)
            np.subtract(owed, decoded, out=residual[part])
        return True

    def encode_difference(self, base: Vector, vector: Vector, payload: Payload, reached: Vector) -> bool:
        """Encode ``vector - base``, and compute the sum of ``base`` and the decoded difference.

        Args:
            base: Shape ``(n,)`` float32.
            vector: Same shape.
            payload: Shape ``(encoded_bytes(n),)`` uint8; it is overwritten.
            reached: Shape ``(n,)`` float32; overwritten by the sum.

        Returns:
            Whether the difference is finite. If it is not, payload and sum are incomplete.
        """
        for part, coded in self.blocks(base.size):
            block = reached[part]
            with np.errstate(over="ignore", invalid="ignore"):
                np.subtract(vector[part], base[part], out=block)
            if not np.isfinite(block).all():
                return False
            payload[coded] = self.encode(block)
            self.decode(payload[coded], block)
            block += base[part]
        return True

    def decode_and_add(self, payload: Payload, base: Vector, out: Vector) -> None:
        """Write the sum of a decoded payload and ``base`` to ``out``, both of shape ``(n,)`` float32.

        Raises:
            ProtocolError: The bytes are no valid payload.
        """
        for part, coded in self.blocks(out.size):
            self.decode(payload[coded], out[part])
            out[part] += base[part]

    def blocks(self, size: int, together: int = 1) -> Iterator[tuple[slice, slice]]:
        """Yield the ranges of independent blocks, and of their bytes in the payload of all ``size`` elements.

        A range has as many consecutive blocks as ``together`` says, the last one the rest.
        """
        at, step = 0, self.block * together or max(size, 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            count = self.encoded_bytes(stop - start)
            yield slice(start, stop), slice(at, at + count)
            at += count


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
        """Copy the numbers."""
        out[:] = payload.view(FLOAT32)


class ErrorFeedback:
    """The running difference between the inputs and the vectors that were sent (Seide et al. 2014).

    With ``e`` the residual, ``C`` the codec and ``g`` the next vector::

        owed = e + g        send C(owed)        e = owed - C(owed)

    so that at any moment: sum of decoded vectors + residual = sum of inputs, up to float32 rounding. As every codec is
    a contraction, the residual stays bounded by the size of the inputs.

    Args:
        size: Number of elements of the vectors.
    """

    def __init__(self, size: int) -> None:
        self._residual = np.zeros(size, np.float32)
        self._is_zero = True

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
            exact = vector if self._is_zero else vector + self._residual  # without a copy as a rule
            self._residual[:] = 0
            self._is_zero = True
            return [codec.encode(exact[bound]) for bound in bounds]
        self._is_zero = False
        payloads = []
        for bound in bounds:
            payload = np.empty(codec.encoded_bytes(bound.stop - bound.start), np.uint8)
            if not codec.encode_owed(vector[bound], self._residual[bound], payload):
                return None
            payloads.append(payload)
        return payloads


def relative_error(vector: Vector, decoded: Vector) -> float:
    """Return omega, ``|decoded - vector|^2 / |vector|^2``; 0 for a zero vector, NaN if not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.dot(vector, vector))
        lost = decoded - vector
        return float(np.dot(lost, lost)) / norm if norm else 0.0
