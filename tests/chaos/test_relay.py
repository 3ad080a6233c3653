"""Relay processes: bytes pass, links are cut, slow or corrupt, for all processes or for some."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from nfdt.chaos.relay import Relay, Rule, flipped
from nfdt.core.errors import NfdtError

LIMIT_S = 120
OWN = (os.getpid(),)
CALLER = r"""
import socket, sys
host, _, port = sys.argv[1].rpartition(":")
connection = socket.create_connection((host, int(port)))
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.recv(100).decode() or "closed\n", end="", flush=True)
"""


def echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def accept(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=echo, args=(connection,), daemon=True).start()


@pytest.fixture
def relay():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        relay = Relay(f"127.0.0.1:{listening.getsockname()[1]}", os.environ)
        yield relay
        relay.stop()
        listening.shutdown(socket.SHUT_RDWR)


def connect(relay: Relay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    """Send bytes and return as many; fewer if the connection ends."""
    connection.sendall(data)
    received = b""
    while len(received) < len(data) and (more := connection.recv(65536)):
        received += more
    return received


def is_over(connection: socket.socket) -> bool:
    try:
        return exchange(connection, b"x") == b""
    except OSError:
        return True


def is_refused(relay: Relay) -> bool:
    with connect(relay) as connection:
        return is_over(connection)


def test_bytes_pass_in_both_directions(relay):
    with connect(relay) as connection:
        data = os.urandom(1_000_000)
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        received = b""
        while len(received) < len(data):
            received += connection.recv(65536)
        sender.join()
        assert received == data


def test_the_end_of_one_side_ends_the_other(relay):
    with connect(relay) as connection:
        assert exchange(connection, b"hello") == b"hello"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(10) == b""


def test_a_cut_ends_connections_and_refuses_new_ones(relay):
    with connect(relay) as connection:
        assert exchange(connection, b"hello") == b"hello"
        relay.set_rule(1, Rule(OWN, cut=True))
        assert is_over(connection)
        assert is_refused(relay)
        relay.set_rule(1, None)
        assert not is_refused(relay)


def test_a_cut_of_one_process_leaves_the_others(relay):
    callers = [
        subprocess.Popen(
            [sys.executable, "-c", CALLER, relay.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        assert [call(one, "before\n") for one in callers] == ["before\n", "before\n"]
        relay.set_rule(1, Rule(pids=(callers[0].pid,), cut=True))
        assert call(callers[1], "after\n") == "after\n"
        assert call(callers[0], "after\n") != "after\n"
    finally:
        for one in callers:
            one.kill()
            one.communicate()


def call(process: subprocess.Popen, line: str) -> str:
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


def test_a_slow_link_takes_longer(relay):
    with connect(relay) as connection:
        relay.set_rule(1, Rule(OWN, delay_ms=100.0))
        began = time.monotonic()
        assert exchange(connection, b"hello") == b"hello"
        assert time.monotonic() - began >= 0.2
        relay.set_rule(1, Rule(OWN, mbit=1.0))
        began = time.monotonic()
        assert exchange(connection, bytes(50_000)) == bytes(50_000)
        assert time.monotonic() - began >= 0.4


def test_one_bit_is_flipped_once(relay):
    with connect(relay) as connection:
        assert exchange(connection, b"hello") == b"hello"
        relay.set_rule(1, Rule(OWN, flip=0.5))
        assert exchange(connection, bytes(8)) == b"\0\0\0\0\1\0\0\0"
        assert exchange(connection, bytes(8)) == bytes(8)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999999])
def test_a_flip_changes_one_bit(place):
    changed = flipped(b"abcdefg", place)
    difference = int.from_bytes(changed, "big") ^ int.from_bytes(b"abcdefg", "big")
    assert difference.bit_count() == 1


def test_a_relay_that_has_ended_is_an_error(relay):
    relay.stop()
    with pytest.raises((NfdtError, ValueError)):
        relay.set_rule(1, None)
