"""Reliable messages over streams that may break: each is kept until the other side acknowledges it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

Message = TypeVar("Message", bound=Any)


class ResendQueue(Generic[Message]):
    """Numbers messages (in their field ``number``) and sends them on the newest stream.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[Message] = deque()
        self._last = 0  # number
        self._stream = 0
        self._ended = False
        self._listeners: tuple[Callable[[], None], ...] = ()  # those of streams on an event loop

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def put(self, message: Message) -> None:
        """Add a message."""
        with self._changed:
            self._last += 1
            message.number = self._last
            self._kept.append(message)
            self._notify()

    def end(self) -> None:
        """End the stream after the messages so far."""
        with self._changed:
            self._ended = True
            self._notify()

    def wake(self) -> None:
        """Begin the time until the next heartbeat anew: the interval has changed."""
        with self._changed:
            self._changed.notify_all()

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to this number, which the other side has received."""
        with self._changed:
            while self._kept and self._kept[0].number <= number:
                self._kept.popleft()

    def clear(self) -> None:
        """Drop all messages, because the other side does not know this sender any more."""
        with self._changed:
            self._kept.clear()

    def open(self) -> int:
        """Open a new stream, for :meth:`messages`; older ones end."""
        with self._changed:
            self._stream += 1
            self._notify()
            return self._stream

    def messages(
        self, stream: int, heartbeat: Callable[[], Message] | None = None, every_s: Callable[[], float] = lambda: 0.0
    ) -> Iterator[Message]:
        """Yield messages to send on a stream: kept ones, then new ones, until the stream or the queue ends.

        Args:
            stream: Number of the stream.
            heartbeat: Returns a message without a number, which is sent after ``every_s()`` seconds without another;
                None: none is sent.
            every_s: Returns these seconds, which may change.
        """
        sent = 0
        while (make := self._next(stream, sent, heartbeat, every_s)) is not None:
            yield (message := make())  # without the lock: a heartbeat may take its time
            sent = message.number or sent

    def _next(
        self, stream: int, sent: int, heartbeat: Callable[[], Message] | None, every_s: Callable[[], float]
    ) -> Callable[[], Message] | None:
        """Return a function that makes the next message; None: there is none any more."""
        with self._changed:
            while stream == self._stream:
                found = self._after(sent)
                if found is not None:
                    return lambda: found
                if self._ended:
                    return None
                if not self._changed.wait(None if heartbeat is None else every_s()) and heartbeat is not None:
                    return heartbeat
            return None

    def _after(self, sent: int) -> Message | None:
        return next((message for message in self._kept if message.number > sent), None)

    async def messages_on_loop(
        self, stream: int, heartbeat: Callable[[], Message], every_s: Callable[[], float]
    ) -> AsyncIterator[Message]:
        """Yield what :meth:`messages` yields, and wait on the event loop."""
        loop, changed, sent = asyncio.get_running_loop(), asyncio.Event(), 0

        def listener() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners += (listener,)
        try:
            beat_at = loop.time() + every_s()
            while True:
                with self._changed:
                    changed.clear()
                    message = self._after(sent)
                    if stream != self._stream or (message is None and self._ended):
                        return
                if message is None and loop.time() >= beat_at:
                    message = heartbeat()
                if message is None:
                    timer = loop.call_at(beat_at, changed.set)
                    await changed.wait()
                    timer.cancel()
                else:
                    yield message
                    sent, beat_at = message.number or sent, loop.time() + every_s()
        finally:
            with self._changed:
                self._listeners = tuple(one for one in self._listeners if one is not listener)
