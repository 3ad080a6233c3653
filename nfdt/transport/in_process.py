"""Shards in the worker's own process: no network, no copies. For tests and a single worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from nfdt.core.arrays import ParameterLayout
from nfdt.shard.push import Gradient, Reply
from nfdt.shard.store import ShardStore
from nfdt.transport.base import Pulled, Pushed, Vector, check_gradient, joined, shard_bounds


class InProcessClient:
    """A ``ParameterClient`` that calls the stores directly.

    Args:
        stores: One per shard, in order.
        layout: Of the whole model.
        worker: This worker's name.
    """

    def __init__(self, stores: Sequence[ShardStore], layout: ParameterLayout, worker: str) -> None:
        self._stores = list(stores)
        self._bounds = shard_bounds(layout, len(self._stores))
        self._worker = worker
        self._sequence = 0
        self.bytes_sent = 0
        self.bytes_received = 0

    def pull(self, min_version: int = 0) -> Pulled:
        """See ``ParameterClient``."""
        replies = [store.pull(self._worker, min_version=min_version) for store in self._stores]
        return Pulled(cast(Vector, joined([r.weights for r in replies])), tuple(r.version for r in replies))

    def push(
        self,
        gradient: Vector,
        *,
        samples: int,
        round: int = 0,
        part: int = 0,
        parts: int = 1,
        want_weights: bool = True,
    ) -> Pushed:
        """See ``ParameterClient``."""
        check_gradient(gradient, self._bounds)
        self._sequence += 1
        replies: list[Reply] = []
        for store, bound in zip(self._stores, self._bounds, strict=True):
            push = Gradient(self._sequence, gradient[bound], samples, round, part, parts)
            replies.append(store.push(self._worker, push, want_weights=want_weights))
        weights = joined([reply.weights for reply in replies])
        versions = tuple(reply.version for reply in replies)
        return Pushed(weights, versions, max(r.staleness for r in replies), all(r.applied for r in replies))

    def close(self) -> None:
        """Nothing to disconnect."""
