"""Estimate of a link from exchanges of several sizes: latency and the time of a byte in each direction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

KEEP = 0.97  # decay factor of the weights of earlier exchanges
ENOUGH = 12
_FIRST = 4  # exchanges before the next one is predicted
_ALIKE = 0.001  # weight of the assumption that both directions are alike
_RIDGE = 1e-6
_CLIP = 4.0


@dataclass(frozen=True)
class LinkTimes:
    """The time of an exchange is ``latency_s + sent * send_s_per_byte + received * receive_s_per_byte``."""

    latency_s: float
    send_s_per_byte: float
    receive_s_per_byte: float

    def seconds(self, sent_bytes: float, received_bytes: float) -> float:
        """Return the time of an exchange of this size."""
        return self.latency_s + sent_bytes * self.send_s_per_byte + received_bytes * self.receive_s_per_byte


class LinkEstimate:
    """Least squares with exponentially decaying weights.

    Only exchanges of different sizes separate latency from bandwidth. An exchange that takes more than four times as
    long as expected counts as four times the expectation. After three in a row the estimate of the link restarts.

    Args:
        unit_bytes: Size of a large message, used only to scale numbers.
    """

    def __init__(self, unit_bytes: int) -> None:
        self._unit = max(unit_bytes, 1)
        self._begin()

    def _begin(self) -> None:
        self._squares = np.zeros((3, 3))
        self._products = np.zeros(3)
        self._variance = 0.0
        self._count = self._strange = 0

    @property
    def known(self) -> bool:
        """Whether enough exchanges were measured."""
        return self._count >= ENOUGH

    def exchanged(self, sent_bytes: int, received_bytes: int, seconds: float) -> None:
        """Add the time of an exchange."""
        row = np.array([1.0, sent_bytes / self._unit, received_bytes / self._unit])
        if self._count >= _FIRST:
            expected = max(float(row @ self._solve()[0]), 1e-6)
            strange = not expected / _CLIP <= seconds <= expected * _CLIP
            self._strange = self._strange + 1 if strange else 0
            if self._strange == 3:
                self._begin()
            else:
                seconds = min(seconds, _CLIP * expected)
                self._variance += (1 - KEEP) * ((seconds - expected) ** 2 - self._variance)
        self._squares = KEEP * self._squares + np.outer(row, row)
        self._products = KEEP * self._products + seconds * row
        self._count += 1

    def link(self) -> LinkTimes:
        """Return the estimate of the link; the time of a byte is reduced by one standard error."""
        solution, inverse = self._solve()
        slack = np.sqrt(np.maximum(self._variance * np.diag(inverse), 0.0))
        send, receive = np.maximum(solution[1:] - slack[1:], 0.0) / self._unit
        return LinkTimes(max(0.0, float(solution[0])), float(send), float(receive))

    def _solve(self) -> tuple[Float64s, Float64s]:
        """Return (latency, send, receive) in seconds and units, and the inverse of their normal matrix."""
        total = max(float(self._squares[0, 0]), 1.0)
        alike = np.array([0.0, 1.0, -1.0])
        squares = self._squares + total * (_ALIKE * np.outer(alike, alike) + _RIDGE * np.eye(3))
        inverse: Float64s = np.asarray(np.linalg.inv(squares), np.float64)
        return inverse @ self._products, inverse
