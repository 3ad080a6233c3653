"""The rendezvous relay of a rank, as Horovod's client speaks to it."""

from __future__ import annotations

import http.client
import subprocess
import sys

import pytest

from hfdt.runtime.rendezvous_relay import LOOPBACK, MOST_BYTES, RendezvousRelay

DEADLINE_S = 30


@pytest.fixture
def values() -> dict[str, bytes]:
    return {}


@pytest.fixture
def relay(values):
    def exchange(key, value):
        if value is not None:
            values[key] = value
        return values.get(key)

    with RendezvousRelay(exchange) as relay:
        yield relay


def ask(relay: RendezvousRelay, method: str, key: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, relay.port, timeout=DEADLINE_S)
    try:
        connection.request(method, key, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_values_are_stored_and_read(relay, values):
    assert ask(relay, "GET", "/global/0") == (404, b"")
    assert ask(relay, "PUT", "/global/0", b"\0address") == (200, b"\0address")
    assert ask(relay, "GET", "/global/0") == (200, b"\0address")
    assert ask(relay, "DELETE", "/global/0") == (200, b"")
    assert values == {"/global/0": b"\0address"}


def test_a_value_that_is_too_large_is_refused(relay, values):
    status, _ = ask(relay, "PUT", "/global/0", b"", **{"Content-Length": str(MOST_BYTES + 1)})
    assert status == 413
    assert values == {}


def test_another_process_is_not_answered(relay, values):
    program = f"""
import socket
with socket.create_connection(({LOOPBACK!r}, {relay.port}), timeout={DEADLINE_S}) as peer:
    try:
        peer.sendall(b"PUT /global/0 HTTP/1.1\\r\\nContent-Length: 1\\r\\n\\r\\nx")
        print(peer.recv(100))
    except ConnectionError:
        print(b"")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "b''", done.stderr
    assert values == {}
