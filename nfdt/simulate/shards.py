"""All shards of a simulated job, in this process: the servers' own stores."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nfdt.coordinator.topology_view import view_of
from nfdt.core.sharding import count_shards
from nfdt.core.sharding.plan import StateCut
from nfdt.core.specs.job import JobSpec
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.shard.building import KeptEngine, Store, build_store
from nfdt.shard.messages import Gradient, Reply


class TimedStore:
    """A shard's store with time measurement; replaces :class:`nfdt.shard.store.ShardStore`.

    Attributes:
        store: The store.
        seconds: Real seconds spent in it.
        order: Requests to it, in order: ``("pull" or "push", worker)``.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.seconds = store, 0.0
        self.order: list[tuple[str, str]] = []

    def pull(self, worker: str, **fields: Any) -> Reply:
        """Pull as ``ShardStore`` does."""
        with self._timed("pull", worker):
            return self.store.pull(worker, **fields)

    def push(self, worker: str, gradient: Gradient, **options: Any) -> Reply:
        """Push as ``ShardStore`` does."""
        with self._timed("push", worker):
            return self.store.push(worker, gradient, **options)

    @contextmanager
    def _timed(self, kind: str, worker: str) -> Iterator[None]:
        self.order.append((kind, worker))
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class LocalShards:
    """The shards of a simulated job, with the calls of its coordinator and client.

    Args:
        spec: The job.
        manifest: Its program.
        state: Initial state.
        pushers: Number of workers that push; groups and allreduce rings count as one.
        kept: Engine of each shard of the last job, used again if possible, by the shard's index.
    """

    def __init__(
        self, spec: JobSpec, manifest: Manifest, state: State, pushers: int, kept: defaultdict[int, KeptEngine]
    ) -> None:
        shards = spec.cluster.shards
        count = count_shards(manifest, shards)
        self.layout = manifest.layout
        self._cut = StateCut(self.layout, count, manifest.optimizer_owners)
        job = (manifest, state, spec.algorithm)
        policy = view_of(spec).policy(spec)
        self.stores = [
            TimedStore(build_store(*job, i, shards, workers=pushers, policy=policy, kept=kept[i])) for i in range(count)
        ]

    @property
    def seconds(self) -> float:
        """Real seconds spent in update rules, optimizers and backups."""
        return sum(store.seconds for store in self.stores)

    def flush(self) -> None:
        """Apply the gradients that still wait to be merged."""
        for timed in self.stores:
            timed.store.flush()

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """Free the state of a lost worker; return those of its tasks that each store has applied."""
        return [frozenset(timed.store.forget(worker, tasks)) for timed in self.stores]

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate from the next update on."""
        for timed in self.stores:
            timed.store.set_learning_rate(value)

    def read(self) -> State:
        """Return weights and optimizer variables."""
        return self._cut.joined([timed.store.read() for timed in self.stores])

    def write(self, state: State) -> None:
        """Continue from this state."""
        self._cut.check(state)
        for index, timed in enumerate(self.stores):
            weights, optimizer = self._cut.own(state, index)
            timed.store.write(np.asarray(weights), optimizer)
