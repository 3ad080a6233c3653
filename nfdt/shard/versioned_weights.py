"""Weights of a shard counted by version, with one snapshot that all replies of a version share."""

from __future__ import annotations

from nfdt.shard.engine import Engine
from nfdt.shard.tensors import Vector


class VersionedWeights:
    """Counts the updates of one shard. Used under the store's lock.

    Attributes:
        engine: Weights, optimizer and rule.
        version: Number of updates applied so far.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = 0
        self._snapshot: Vector = None

    def snapshot(self) -> Vector:
        """Return the weights of this version; one copy serves all workers that ask for them."""
        if self._snapshot is None:
            self._snapshot = self.engine.weights()
        return self._snapshot

    def advance(self) -> None:
        """Count an update that the engine has made."""
        self.version += 1
        self._snapshot = None
