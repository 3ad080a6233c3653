"""Interruption of a client's exchange by another thread, wherever it waits."""

from __future__ import annotations

import threading

import pytest

from nfdt.core.errors import ServerUnreachable
from nfdt.core.work.slot_connection import Patience
from nfdt.transport.emulated_link import EmulatedLink
from nfdt.transport.stream import StreamClient
from tests.support.shard_cluster import LAYOUT, gradients
from tests.support.streams import WORKER_TOKEN, FrameRelay, serve

HANGS_S = 120.0
NEVER_S = 3600.0


@pytest.fixture
def shard():
    running = serve(overlap=2)[0]
    yield running
    running.stop(0)


@pytest.fixture
def relay(shard):
    made = FrameRelay(shard.address)
    yield made
    made.stop()


@pytest.fixture
def connect():
    clients = []

    def make(address, **options):
        clients.append(StreamClient([address], LAYOUT, "w", WORKER_TOKEN, timeout_s=NEVER_S, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class Exchange:
    """Exchange on another thread, and the error that ends it."""

    def __init__(self, call):
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call):
        try:
            call()
        except Exception as error:
            self.error = error

    def end(self):
        self._thread.join(HANGS_S)
        assert not self._thread.is_alive()
        return self.error


@pytest.mark.parametrize("overlap", [0, 2], ids=["one_thread", "threads"])
def test_a_wait_for_the_reply_of_a_silent_shard_ends(connect, relay, overlap):
    asked = threading.Event()
    relay.silent, relay.on_request = True, asked.set
    client = connect(relay.address, overlap=overlap, share_memory=False)
    exchange = Exchange(client.pull)
    assert asked.wait(HANGS_S)
    client.interrupt()
    assert isinstance(exchange.end(), ServerUnreachable)


@pytest.mark.parametrize("overlap", [0, 2], ids=["one_thread", "threads"])
def test_the_search_for_a_shard_that_is_gone_ends(connect, shard, overlap):
    searching = threading.Event()

    class Watched(Patience):
        def failure(self, since=None):
            searching.set()
            return super().failure(since)

    client = connect(shard.address, overlap=overlap, patience=Watched(NEVER_S, threading.Event()))
    client.pull()
    shard.stop(0)
    exchange = Exchange(lambda: client.push(gradients(1)[0], samples=1))
    assert searching.wait(HANGS_S)
    client.interrupt()
    assert exchange.end() is not None


def test_a_wait_for_a_reply_that_an_emulated_link_delays_ends(connect, shard):
    client = connect(shard.address, overlap=2, emulated=EmulatedLink(None, NEVER_S * 1000, threading.Event()))
    exchange = Exchange(client.pull)
    client.interrupt()
    assert exchange.end() is not None


def test_a_stream_that_is_being_opened_meanwhile_is_interrupted_too(connect, relay):
    relay.silent = True
    client = connect(relay.address, share_memory=False)
    opened, connector = relay.listener.ticket, client

    def ticket(worker):
        connector.interrupt()
        return opened(worker)

    relay.listener.ticket = ticket
    assert Exchange(client.pull).end() is not None


def test_no_exchange_begins_after_an_interruption(connect, shard):
    client = connect(shard.address, overlap=2)
    client.pull()
    sent = client.bytes_sent
    client.interrupt()
    with pytest.raises(ServerUnreachable):
        client.push(gradients(1)[0], samples=1)
    assert shard.store.version == 0
    assert client.bytes_sent >= sent
