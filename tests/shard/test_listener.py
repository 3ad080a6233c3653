"""Admission of connections that push and pull, and errors that the accepting thread survives."""

import queue
import socket
import threading

import pytest

from nfdt.core.wire.connection import connect
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.shard import listener as listener_module
from nfdt.shard.listener import MOST_ANONYMOUS, ShardListener

TIMEOUT_S = 60


@pytest.fixture
def served():
    return queue.SimpleQueue()


@pytest.fixture
def listener(served):
    made = ShardListener(served.put, "127.0.0.1", 8)
    yield made
    made.stop(0)


@pytest.fixture
def start_no_connection_threads(monkeypatch):
    """Return a context manager in which no thread is started for a connection, as at a limit on threads."""
    start = threading.Thread.start

    def failing(thread):
        if thread.name == "shard-connection":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        yield patch


def is_closed(port):
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as refused:
        try:
            return refused.recv(1) == b""
        except ConnectionResetError:
            return True


def shows(listener, ticket):
    return FrameStream(connect("127.0.0.1", listener.port, ticket, timeout_s=TIMEOUT_S))


def test_a_good_ticket_lets_in(listener, served):
    shows(listener, listener.ticket("worker-0")).close()
    served.get(timeout=TIMEOUT_S)


def test_a_ticket_admits_no_connection_after_its_time(listener, served, monkeypatch):
    monkeypatch.setattr(listener_module, "TICKET_S", 0.0)
    stream = shows(listener, listener.ticket("worker-0"))
    assert stream.receive_header() is None
    assert served.empty()
    stream.close()


def test_connections_that_find_no_thread_are_closed_and_the_next_ones_served(
    listener, served, start_no_connection_threads
):
    assert all(is_closed(listener.port) for _ in range(MOST_ANONYMOUS + 1))  # none stays counted as unauthenticated
    start_no_connection_threads.undo()
    shows(listener, listener.ticket("worker-0")).close()
    served.get(timeout=TIMEOUT_S)


def test_connections_that_find_no_thread_are_one_line_of_the_log(listener, start_no_connection_threads, caplog):
    assert all(is_closed(listener.port) for _ in range(5))
    listener.stop(0)
    assert len([line for line in caplog.messages if "no thread could serve it" in line]) == 1


def test_a_request_that_outlasts_the_stop_is_reported():
    begun, released = threading.Event(), threading.Event()

    def serve(stream, worker):
        begun.set()
        released.wait(TIMEOUT_S)

    listener = ShardListener(serve, "127.0.0.1", 8)
    stream = shows(listener, listener.ticket("worker-0"))
    assert begun.wait(TIMEOUT_S)
    assert not listener.stop(0)
    released.set()
    assert listener.stop(TIMEOUT_S)
    stream.close()
