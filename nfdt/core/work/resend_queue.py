"""Reliable messages over streams that may break: each is kept until the other side acknowledges it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
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

    def put(self, message: Message) -> None:
        """Add a message."""
        with self._changed:
            self._last += 1
            message.number = self._last
            self._kept.append(message)
            self._changed.notify_all()

    def end(self) -> None:
        """End the stream after the messages so far."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

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
            self._changed.notify_all()
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
        while (message := self._next(stream, sent, heartbeat, every_s)) is not None:
            yield message
            sent = message.number or sent

    def _next(
        self, stream: int, sent: int, heartbeat: Callable[[], Message] | None, every_s: Callable[[], float]
    ) -> Message | None:
        with self._changed:
            while stream == self._stream:
                found = next((message for message in self._kept if message.number > sent), None)
                if found is not None or self._ended:
                    return found
                if not self._changed.wait(None if heartbeat is None else every_s()) and heartbeat is not None:
                    return heartbeat()
            return None
