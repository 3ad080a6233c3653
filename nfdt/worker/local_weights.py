"""Weights of a worker that makes steps of its own between two exchanges."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.transport.base import Pulled


class OwnSteps(Protocol):
    """The model whose steps change its weights, flat, shape ``(P,)``, float32."""

    def load(self, weights: Array) -> None:
        """Replace the weights."""

    def read(self) -> Array:
        """Return a copy of the weights."""


class LocalWeights:
    """Weights of a worker between two exchanges.

    While a push is on its way the worker goes on from its own weights. With the reply, what it has changed since is
    added to the weights received, so that every step counts once. The next push waits for it::

        push       D = base - own;  base = own
        reply      own = w + (own - base);  base = w

    With one worker the weights received are those that it has pushed, and nothing changes.

    Args:
        steps: The model.
    """

    def __init__(self, steps: OwnSteps) -> None:
        self._steps = steps
        self._base: Array | None = None
        self._followed: int | None = None  # sequence number of the reply on which the weights are based
        self._changed = False  # since the base

    def follow(self, held: Pulled) -> None:
        """Go on from the weights of a reply, unless it is followed already."""
        if held.sequence == self._followed:
            return
        received = np.array(held.weights)  # the client may write there during its next requests
        own = received
        if self._base is not None and self._changed:
            own = received + (self._steps.read() - self._base)
        self._steps.load(own)
        self._base, self._followed = received, held.sequence

    def stepped(self) -> None:
        """Record that the model has made a step."""
        self._changed = True

    def difference(self) -> Array:
        """Return what the steps since the last call have changed, the weights before minus those after them."""
        assert self._base is not None, "a step follows a reply"
        own = self._steps.read()
        difference: Array = self._base - own
        self._base, self._changed = own, False
        return difference

    def forget(self) -> None:
        """Begin anew with the next reply: the shards have gone back, or others have used the model."""
        self._base, self._followed, self._changed = None, None, False
