"""Weights of a shard with a version number, and one snapshot that all replies of a version share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from nfdt.shard.engine import Engine, Vector

E = TypeVar("E", bound=Engine)


class VersionedWeights(Generic[E]):
    """Version counter of one shard. Used under the store's lock.

    Args:
        engine: Weights, optimizer and rule.
        notify: Called for every new version.

    Attributes:
        version: Number of updates applied.
    """

    def __init__(self, engine: E, notify: Callable[[], None]) -> None:
        self.engine = engine
        self._notify = notify
        self.version = 0
        self._snapshot: Vector = None

    def snapshot(self) -> Vector:
        """Return the weights of this version; all workers that request them share one copy."""
        if self._snapshot is None:
            self._snapshot = self.engine.weights()
        return self._snapshot

    def advance(self) -> None:
        """Count an update that the engine has applied."""
        self.version += 1
        self._snapshot = None
        self._notify()
