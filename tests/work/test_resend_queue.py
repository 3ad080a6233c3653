"""Streams of a queue on an event loop: what is put by other threads, heartbeats, and their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.resend_queue import ResendQueue

DEADLINE_S = 60.0
NEVER_S = 3600.0


def release(job_id: str) -> pb.Assignment:
    return pb.Assignment(release=pb.Release(job_id=job_id))


def beat() -> pb.Assignment:
    return pb.Assignment(heartbeat=pb.Heartbeat())


class Stream:
    """A stream of a queue on an event loop."""

    def __init__(self, queue: ResendQueue, every_s: Callable[[], float] = lambda: NEVER_S) -> None:
        self._messages = queue.messages_on_loop(queue.open(), beat, every_s)

    async def next(self) -> str | None:
        """Return the job of the next message, "beat", or None at the end of the stream."""
        message = await asyncio.wait_for(anext(self._messages, None), DEADLINE_S)
        if message is None:
            return None
        return "beat" if message.HasField("heartbeat") else message.release.job_id


@pytest.fixture
def queue() -> ResendQueue:
    return ResendQueue()


def test_messages_of_other_threads_arrive_in_order_and_the_end_comes_last(queue):
    def put() -> None:
        for job_id in ("second", "third"):
            queue.put(release(job_id))
        queue.end()

    async def read() -> list[str | None]:
        queue.put(release("first"))
        stream = Stream(queue)
        received = [await stream.next()]
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        await asyncio.to_thread(put)
        return [*received, await waiting, await stream.next(), await stream.next()]

    assert asyncio.run(read()) == ["first", "second", "third", None]


def test_a_newer_stream_ends_the_older_one_and_sends_what_is_not_acknowledged(queue):
    async def read() -> tuple[str | None, str | None, str | None]:
        older = Stream(queue)
        waiting = asyncio.create_task(older.next())
        await asyncio.sleep(0)
        queue.put(release("one"))
        first = await waiting
        newer = Stream(queue)
        return first, await older.next(), await newer.next()

    assert asyncio.run(read()) == ("one", None, "one")


def test_heartbeats_come_while_there_is_nothing_else(queue):
    async def read() -> list[str | None]:
        stream = Stream(queue, lambda: 0.0)
        received = [await stream.next()]
        queue.put(release("one"))
        return [*received, await stream.next(), await stream.next()]

    assert asyncio.run(read()) == ["beat", "one", "beat"]
