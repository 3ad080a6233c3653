"""A synchronous round: its parts, summed in their own order whatever the order of arrival."""

from __future__ import annotations

import math
from typing import Any

from nfdt.core.errors import ProtocolError
from nfdt.shard.engine import Engine, Pending
from nfdt.shard.messages import Gradient


class Round:
    """The parts of one round so far.

    Args:
        engine: Adds gradients; used under the store's lock.
        first: The part that arrived first.
    """

    def __init__(self, engine: Engine, first: Gradient) -> None:
        self.number = first.round
        self.pending: Pending = engine.new_pending()
        self._engine = engine
        self._parts = first.parts
        self._next = 0
        self._early: dict[int, tuple[Any, int, float]] = {}

    @property
    def complete(self) -> bool:
        """Whether every part has come."""
        return self._next == self._parts

    def has(self, part: int) -> bool:
        """Whether this part has come."""
        return part < self._next or part in self._early

    def check(self, worker: str, gradient: Gradient) -> None:
        """Raise ProtocolError unless the gradient is a part of this round."""
        if (gradient.round, gradient.parts) != (self.number, self._parts) or gradient.part >= self._parts:
            raise ProtocolError(
                f"Push from worker {worker}: expected a part of round {self.number} with {self._parts} parts. "
                f"Received: part {gradient.part} of {gradient.parts}, round {gradient.round}."
            )

    def take(self, gradient: Gradient, length: float) -> None:
        """Add a part of this length; one that is not finite counts for nothing.

        The vector is borrowed: what must wait for earlier parts is copied.
        """
        in_order = gradient.part == self._next
        vector = self._engine.tensor(gradient.values if in_order else gradient.values.copy())
        self._early[gradient.part] = (vector, gradient.samples, length)
        while self._next in self._early:
            self._add(self._next)
            self._next += 1

    def finish(self) -> None:
        """Add what came early although parts before it are missing."""
        for part in sorted(self._early):
            self._add(part)

    def _add(self, part: int) -> None:
        vector, samples, length = self._early.pop(part)
        if math.isfinite(length):
            self._engine.add(self.pending, vector, samples, length)
