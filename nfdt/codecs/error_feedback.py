"""What a codec loses is added to what is sent next, so that nothing is lost for good (Seide et al. 2014)."""

from __future__ import annotations

import numpy as np

from nfdt.codecs.base import Vector


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
        self._owed = np.zeros(size, np.float32)
        self._residual = np.zeros(size, np.float32)
        self._settled = True

    @property
    def residual(self) -> Vector:
        """What has not been sent, shape ``(size,)``; a view that the next call changes."""
        return self._residual

    @property
    def settled(self) -> bool:
        """Whether nothing is owed: the residual is zero."""
        return self._settled

    def owed(self, vector: Vector) -> Vector | None:
        """What should be sent now: ``vector`` and the residual; a view that the next call changes.

        Returns:
            None if it is not finite. Nothing is noted then: what is sent in its place will not be applied.
        """
        if self._settled:
            np.copyto(self._owed, vector)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(self._residual, vector, out=self._owed)
        return self._owed if np.isfinite(self._owed).all() else None

    def sent(self, decoded: Vector | None) -> None:
        """The receiver makes this of what was owed; None: exactly that."""
        self._settled = decoded is None
        if decoded is None:
            self._residual[:] = 0
        else:
            np.subtract(self._owed, decoded, out=self._residual)
