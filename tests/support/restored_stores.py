"""Stores of all shards of a program, copied as artifacts, and started again from the copies."""

from __future__ import annotations

import numpy as np

from nfdt.core.arrays.safetensors_io import dump_parts, load_arrays
from nfdt.core.sharding import count_shards
from nfdt.core.sharding.plan import StateCut
from nfdt.core.sharding.records import join_records, to_arrays
from nfdt.model.program.state import State, dump_state, load_state
from nfdt.shard.building import build_store
from nfdt.shard.messages import Gradient

WORKERS = ("a", "b", "c/1")


class Shards:
    """All shards of a program, in one incarnation: workers pull first, and number their requests from 1."""

    def __init__(self, manifest, state, algorithm, *, shards=1, workers=3, records=None):
        self._made = (manifest, algorithm)
        self._options = {"shards": shards, "workers": workers}
        self._cut = StateCut(manifest.layout, count_shards(manifest, shards), manifest.optimizer_owners)
        self.stores = [
            build_store(manifest, state, algorithm, index, shards, workers=workers, records=records)
            for index in range(count_shards(manifest, shards))
        ]
        self.in_rounds = algorithm.consistency_facts.synchronous
        self._bounds = np.cumsum([0, *(store.size for store in self.stores)])
        self.sequences = {}

    def snapshot(self):
        """Return the bytes of both artifacts."""
        copies = [store.hold(records=True).copied() for store in self.stores]
        state = self._cut.joined([(copy.weights, copy.optimizer) for copy in copies])
        records = join_records([to_arrays(copy.records) for copy in copies])
        return dump_state(state.weights, state.optimizer, {}), b"".join(dump_parts(records))

    def restored(self, state, records):
        """Return the next incarnation, from the bytes of both artifacts."""
        manifest, algorithm = self._made
        return Shards(manifest, load_state(state), algorithm, **self._options, records=load_arrays(records))

    def pull(self, worker):
        sequence = self._next(worker)
        return [store.pull(worker, sequence=sequence).weights.copy() for store in self.stores]

    def push(self, worker, gradient, only=None, **fields):
        """Push to all shards, or to one; return what a worker sees of the replies."""
        sequence, seen = self._next(worker), []
        for index, store in enumerate(self.stores):
            if only in (None, index):
                part = np.array(gradient[self._bounds[index] : self._bounds[index + 1]])
                reply = store.push(worker, Gradient(sequence, part, **fields))
                seen.append((reply.weights.copy(), reply.staleness, reply.version, reply.applied))
        return seen

    def _next(self, worker):
        self.sequences[worker] = self.sequences.get(worker, 0) + 1
        return self.sequences[worker]

    def read(self) -> State:
        return self._cut.joined([store.read() for store in self.stores])


def train(shards, steps, seed, workers=WORKERS):
    """Let workers pull and push, in rounds if the stores have rounds; return all replies.

    Workers are of different speeds, and the last one pushes rarely.
    """
    rng = np.random.default_rng(seed)
    first, size = shards.stores[0], sum(store.size for store in shards.stores)
    replies = [shards.pull(worker) for worker in workers]
    for step in range(steps):
        if shards.in_rounds:
            fields = {"round": first.closed_round + 1, "parts": len(workers)}
            replies += [shards.push(w, gradient_of(rng, size), part=i, **fields) for i, w in enumerate(workers)]
        else:
            worker = workers[-1] if step % 5 == 4 else workers[step % (len(workers) - 1)]
            replies.append(shards.push(worker, gradient_of(rng, size), samples=1 + step % 3, rate=0.5 + step / 10))
    return replies


def gradient_of(rng, size):
    return rng.normal(size=size).astype(np.float32)


def same(found, wanted):
    """Check that two nested lists hold the same numbers, bit for bit."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, list | tuple):
            same(one, other)
        else:
            np.testing.assert_array_equal(one, other)


def check_continuation(shards, *, before=7, after=7, workers=WORKERS):
    """Train, copy, train on; the same training from the copy gives the same replies and state. Return the restored.

    All workers pull at the moment of the copy, in both trainings.
    """
    train(shards, before, 1, workers)
    copies = shards.snapshot()
    restored = shards.restored(*copies)
    assert [store.version for store in restored.stores] == [store.version for store in shards.stores]
    assert [store.closed_round for store in restored.stores] == [store.closed_round for store in shards.stores]
    wanted, found = train(shards, after, 2, workers), train(restored, after, 2, workers)
    same(found, wanted)
    one, other = restored.read(), shards.read()
    np.testing.assert_array_equal(one.weights, other.weights)
    assert sorted(one.optimizer) == sorted(other.optimizer)
    for index, value in other.optimizer.items():
        np.testing.assert_array_equal(one.optimizer[index], value)
    return restored
