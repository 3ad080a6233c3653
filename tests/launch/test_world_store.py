"""Rendezvous of the ranks of a ring: who is admitted, limits, and its end."""

from __future__ import annotations

import threading

import pytest

from nfdt.core.errors import AuthenticationFailed, ProtocolError
from nfdt.launch.world_store import KEYS_PER_RANK, MOST_KEY, WorldStore, WorldStores

DEADLINE_S = 30.0


def test_a_value_is_returned_to_who_waits_for_it():
    store = WorldStore(2)
    found = []
    reader = threading.Thread(target=lambda: found.append(store.get("/global/0", DEADLINE_S)))
    reader.start()
    store.put("/global/0", b"address")
    reader.join(DEADLINE_S)
    assert found == [b"address"]


def test_a_value_that_nobody_stores_is_none():
    assert WorldStore(2).get("/global/0", 0.0) is None


def test_keys_and_values_are_limited_by_the_number_of_ranks():
    store = WorldStore(2)
    for key, value in (("", b""), ("k" * (MOST_KEY + 1), b""), ("key", bytes(2**16))):
        with pytest.raises(ProtocolError):
            store.put(key, value)
    for number in range(2 * KEYS_PER_RANK):
        store.put(f"/{number}", b"x")
    with pytest.raises(ProtocolError, match="at most 32 keys"):
        store.put("/one more", b"x")
    store.put("/0", b"another value of a known key")


@pytest.mark.parametrize(("ring", "secret"), [("ring-1", "guessed"), ("ring-1", ""), ("ring-2", "own")])
def test_only_the_rings_own_name_and_secret_are_admitted(ring, secret):
    stores = WorldStores()
    store = stores.open("ring-1", 2)
    assert stores.find("ring-1", store.secret) is store
    with pytest.raises(AuthenticationFailed):
        stores.find(ring, store.secret if secret == "own" else secret)


def test_a_ring_that_has_formed_has_no_store():
    stores = WorldStores()
    store = stores.open("ring-1", 2)
    store.put("/global/0", b"address")
    waiting = threading.Thread(target=store.get, args=("/global/1", DEADLINE_S))
    waiting.start()
    stores.close("ring-1")
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert store.get("/global/0", 0.0) is None
    with pytest.raises(AuthenticationFailed, match="that is forming"):
        stores.find("ring-1", store.secret)
    stores.close("ring-1")


def test_the_secret_is_in_no_text():
    store = WorldStore(2)
    assert store.secret not in repr(store)
