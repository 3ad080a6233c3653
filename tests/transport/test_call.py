"""One connection to one shard: errors are raised in the caller that waits for the answer."""

import threading

from nfdt.core.wire.shards_pb2 import PULL, Frame
from nfdt.transport.link import ShardCall, ShardRequest

DEADLINE_S = 60


class Stream:
    """Stream of a shard that never answers."""

    def __init__(self):
        self._closed = threading.Event()

    def receive_header(self, *, patiently):
        assert self._closed.wait(DEADLINE_S)

    def close(self):
        self._closed.set()


class Link:
    def send(self, size, asked_at):
        raise ValueError("no such link")


def test_a_request_that_cannot_be_made_ends_the_wait_for_its_answer():
    call = ShardCall(Stream(), None, Link(), threads=True)
    call.ask(ShardRequest(Frame(kind=PULL, sequence=1), memoryview(b""), memoryview(b"")))
    assert str(call.answer(DEADLINE_S)) == "no such link"
    call.close()
