"""Gradients of asynchronous pushes that wait to be applied together (softsync)."""

from __future__ import annotations

from nfdt.shard.backups import Backup
from nfdt.shard.engine import Engine, Pending
from nfdt.shard.messages import Gradient
from nfdt.update_rules.base import State


class Merge:
    """What has been corrected on arrival and not applied.

    Args:
        engine: Corrects and applies; used under the store's lock.
        count: How many gradients make an update; with 1 each is applied by itself, and nothing waits here.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._count = count
        self._pending: Pending | None = None

    @property
    def waits(self) -> bool:
        """Whether gradients wait for others at all."""
        return self._count > 1

    @property
    def complete(self) -> bool:
        """Whether all gradients of an update have come."""
        return self._pending is not None and self._pending.count >= self._count

    def take(self, gradient: Gradient, backup: Backup, staleness: int, worker: State, length: float) -> State:
        """Correct a gradient of this length and keep it; returns the rule's new state for its worker."""
        self._pending = self._pending or self._engine.new_pending()
        args = (self._engine.tensor(gradient.values), backup.weights, staleness, worker, gradient.samples)
        return self._engine.hold(self._pending, *args, length=length)

    def finish(self) -> bool | None:
        """Apply what waits; None where nothing does, False where it was refused."""
        pending, self._pending = self._pending, None
        return None if pending is None else self._engine.step_held(pending)

    def drop(self) -> None:
        """Forget what waits."""
        self._pending = None
