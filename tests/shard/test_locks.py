"""What threads share in a store is touched under its lock only."""

from __future__ import annotations

import threading

import keras
import pytest

from nfdt.codecs import make_codec
from nfdt.shard.messages import Gradient, Wish
from tests.support.shard_cluster import Cluster, Reference, gradients, start_weights

UNGUARDED = {"array", "tensor", "size"}  # of an engine: they touch no state of it


class Lock(threading.Condition):
    """Knows whether somebody is inside."""

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
    """Passes everything on, and looks whether the lock is held."""

    def __init__(self, held, lock, unguarded=frozenset()):
        self._held, self._lock, self._unguarded = held, lock, unguarded

    def __getattr__(self, name):
        if name not in self._unguarded:
            self._lock.check(name)
        return getattr(self._held, name)

    def __contains__(self, key):
        self._lock.check(key)
        return key in self._held

    def __getitem__(self, key):
        self._lock.check(key)
        return self._held[key]

    def __setitem__(self, key, value):
        self._lock.check(key)
        self._held[key] = value

    def __len__(self):
        self._lock.check("workers")
        return len(self._held)


@pytest.fixture
def store():
    store = Cluster(Reference(keras.optimizers.SGD(0.1, momentum=0.9)), rule="ddc").stores[0]
    store.pull("w", sequence=1)
    store._changed = lock = Lock()
    store._engine = Guarded(store._engine, lock, UNGUARDED)
    store._workers = Guarded(store._workers, lock)
    store._statistics = Guarded(store._statistics, lock)
    return store


WISH = Wish(make_codec("int8", top_k=0.1), 1)
OPERATIONS = {
    "pull": lambda store: store.pull("w", sequence=2),
    "pull a difference": lambda store: store.pull("w", sequence=2, wish=WISH),
    "push": lambda store: store.push("w", Gradient(2, gradients(1)[0])),
    "push for a difference": lambda store: store.push("w", Gradient(2, gradients(1)[0]), wish=WISH),
    "push a part": lambda store: store.push("w", Gradient(2, gradients(1)[0], round=1)),
    "flush": lambda store: store.flush(),
    "forget": lambda store: store.forget("w"),
    "set_learning_rate": lambda store: store.set_learning_rate(0.5),
    "statistics": lambda store: store.statistics(),
    "read": lambda store: store.read(),
    "write": lambda store: store.write(start_weights(), {}),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_a_store_touches_what_threads_share_under_its_lock(store, operation):
    operation(store)
    assert store._changed.depth == 0


def test_differences_are_what_these_operations_make(store):
    """Otherwise the test above would not see how they are noted."""
    assert OPERATIONS["push for a difference"](store).difference is not None


def test_the_guard_sees_what_is_done_without_the_lock(store):
    for touch in (lambda: store._engine.read(), lambda: store._workers["w"], lambda: store._workers.pop("w", None)):
        with pytest.raises(AssertionError, match="without the lock"):
            touch()
