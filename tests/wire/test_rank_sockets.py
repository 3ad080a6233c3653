"""Connections of a world: they end with it, and all others stay open."""

from __future__ import annotations

import os
import socket

import pytest

from nfdt.core.wire.rank_sockets import RankSockets


@pytest.fixture
def connect():
    """Return connections to a server that stops listening, as Gloo's do once all ranks are connected."""
    opened: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine = socket.create_connection(server.getsockname(), timeout=10)
            theirs, _ = server.accept()
        theirs.settimeout(10)
        opened.extend((mine, theirs))
        return mine, theirs

    yield make
    for one in opened:
        one.close()


def test_connections_that_a_world_opened_are_ended_and_earlier_ones_are_not(connect):
    earlier, earlier_peer = connect()
    sockets = RankSockets()
    with sockets.recorded():
        _, peer = connect()
    later, later_peer = connect()
    sockets.cut()
    assert peer.recv(1) == b""
    for mine, theirs in ((earlier, earlier_peer), (later, later_peer)):
        mine.sendall(b"x")
        assert theirs.recv(1) == b"x"


def test_a_descriptor_that_belongs_to_another_connection_by_now_is_left_alone(connect):
    sockets = RankSockets()
    with sockets.recorded():
        mine, _ = connect()
    kept, kept_peer = connect()
    os.dup2(kept.fileno(), mine.fileno())
    sockets.cut()
    kept.sendall(b"x")
    assert kept_peer.recv(1) == b"x"


def test_what_a_server_of_this_process_accepts_meanwhile_is_no_rank_s():
    sockets = RankSockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with sockets.recorded():
            client = socket.create_connection(server.getsockname(), timeout=10)
            accepted, _ = server.accept()
        with client, accepted:
            descriptors = {descriptor for descriptor, _ in sockets._links}
            assert accepted.fileno() not in descriptors
            assert client.fileno() in descriptors
