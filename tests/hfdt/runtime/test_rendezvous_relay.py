"""The rendezvous relay of a rank, as Horovod's client speaks to it."""

from __future__ import annotations

import http.client
import subprocess
import sys

import pytest

from hfdt.runtime.rendezvous_relay import LOOPBACK, MOST_BYTES, serve_rendezvous

DEADLINE_S = 30


@pytest.fixture
def values() -> dict[str, bytes]:
    return {}


@pytest.fixture
def port(values):
    def exchange(key, value):
        if value is not None:
            values[key] = value
        return values.get(key)

    with serve_rendezvous(exchange) as port:
        yield port


def ask(port: int, method: str, key: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=DEADLINE_S)
    try:
        connection.request(method, key, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def test_values_are_stored_and_read(port, values):
    assert ask(port, "GET", "/global/0") == (404, b"")
    assert ask(port, "PUT", "/global/0", b"\0address") == (200, b"\0address")
    assert ask(port, "GET", "/global/0") == (200, b"\0address")
    assert ask(port, "DELETE", "/global/0") == (200, b"")
    assert values == {"/global/0": b"\0address"}


def test_a_value_that_is_too_large_is_refused(port, values):
    status, _ = ask(port, "PUT", "/global/0", b"", **{"Content-Length": str(MOST_BYTES + 1)})
    assert status == 413
    assert values == {}


def test_another_process_is_not_answered(port, values):
    program = f"""
import socket
with socket.create_connection(({LOOPBACK!r}, {port}), timeout={DEADLINE_S}) as peer:
    try:
        peer.sendall(b"PUT /global/0 HTTP/1.1\\r\\nContent-Length: 1\\r\\n\\r\\nx")
        print(peer.recv(100))
    except ConnectionError:
        print(b"")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "b''", done.stderr
    assert values == {}
