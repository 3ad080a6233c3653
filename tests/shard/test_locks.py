"""Shared state of a store, which threads access under its lock only."""

from __future__ import annotations

import threading
from functools import partial

import keras
import pytest

from nfdt.codecs import make_codec
from nfdt.shard.messages import DeltaRequest, Gradient
from nfdt.shard.modes import AsynchronousMode, MergedMode, RoundMode
from nfdt.shard.store import ShardStore
from tests.support.shard_cluster import Cluster, Reference, gradients, start_weights

UNGUARDED = {"array", "tensor", "size"}  # of an engine: they access no state of it


class Lock(threading.Condition):
    """Lock that records whether it is held."""

    depth = 0

    def __enter__(self):
        entered = super().__enter__()
        self.depth += 1
        return entered

    def __exit__(self, *error):
        self.depth -= 1
        return super().__exit__(*error)

    def check(self, what):
        assert self.depth, f"{what} is touched without the lock"


class Guarded:
    """Proxy that forwards all accesses and checks that the lock is held."""

    def __init__(self, held, lock, unguarded=frozenset()):
        self._held, self._lock, self._unguarded = held, lock, unguarded

    def __getattr__(self, name):
        if name not in self._unguarded:
            self._lock.check(name)
        return getattr(self._held, name)


def guarded_store(mode=AsynchronousMode):
    """Return a store whose engine, backups, mode and statistics detect an access without the lock."""
    lock = Lock()
    engine = Cluster(Reference(keras.optimizers.SGD(0.1, momentum=0.9)), rule="ddc").stores[0]._engine
    with lock:
        store = ShardStore(Guarded(engine, lock, UNGUARDED), mode=mode)
        store._changed = lock
        store._backups = Guarded(store._backups, lock)
        store._mode = Guarded(store._mode, lock, {"in_rounds"})
        store._statistics = Guarded(store._statistics, lock)
    store.pull("w", sequence=1)
    return store


@pytest.fixture
def store():
    return guarded_store()


REQUEST = DeltaRequest(make_codec("int8", top_k=0.1), 1)
OPERATIONS = {
    "pull": lambda store: store.pull("w", sequence=2),
    "pull a delta": lambda store: store.pull("w", sequence=2, delta=REQUEST),
    "push": lambda store: store.push("w", Gradient(2, gradients(1)[0])),
    "push for a delta": lambda store: store.push("w", Gradient(2, gradients(1)[0]), delta=REQUEST),
    "flush": lambda store: store.flush(),
    "forget": lambda store: store.forget("w"),
    "set_learning_rate": lambda store: store.set_learning_rate(0.5),
    "statistics": lambda store: store.statistics(),
    "read": lambda store: store.read(),
    "snapshot": lambda store: store.hold(records=True).copied(),
    "write": lambda store: store.write(start_weights(), {}),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_a_store_touches_what_threads_share_under_its_lock(store, operation):
    operation(store)
    assert store._changed.depth == 0


def test_a_part_of_a_round_is_applied_under_the_lock():
    assert guarded_store(RoundMode).push("w", Gradient(2, gradients(1)[0], round=1)).version == 1


def test_a_merge_is_applied_under_the_lock():
    store = guarded_store(partial(MergedMode, count=2))
    assert [store.push("w", Gradient(2 + i, gradients(1)[0])).version for i in range(2)] == [0, 1]


def test_deltas_are_what_these_operations_make(store):
    """Check the list of operations, without which the test above would miss how deltas are recorded."""
    assert OPERATIONS["push for a delta"](store).delta is not None


def test_the_guard_sees_what_is_done_without_the_lock(store):
    for touch in (lambda: store._engine.read(), lambda: store._backups.known("w"), lambda: store._mode.flush()):
        with pytest.raises(AssertionError, match="without the lock"):
            touch()
