"""Delivery of a process's spans to the server, with an estimate of how the clocks differ."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nfdt.core.errors import NfdtError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.spans import SpanRing

EVERY_S = 5.0
ASKS = 3  # questions for the server's time per delivery; the one with the shortest round trip counts


class ClockEstimate:
    """Difference between the server's clock and this process's, as in NTP: from the middle of a round trip.

    Args:
        ask: Returns the server's Unix time.
        now: This process's Unix time.

    Attributes:
        offset_s: The server's clock minus this one.
        error_s: Half of the round trip: the estimate is off by no more.
    """

    def __init__(self, ask: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        self._ask, self._now = ask, now
        self.offset_s, self.error_s = 0.0, float("inf")

    def renew(self) -> None:
        """Ask for the server's time; without an answer the estimate before stays."""
        self.error_s = float("inf")  # clocks drift
        for _ in range(ASKS):
            asked = self._now()
            try:
                at = self._ask()
            except NfdtError:
                return
            answered = self._now()
            if (answered - asked) / 2 < self.error_s:
                self.offset_s, self.error_s = at - (asked + answered) / 2, (answered - asked) / 2


@contextmanager
def delivered_spans(
    spans: SpanRing, clock: ClockEstimate, send: Callable[[pb.SlotSpans], object], every_s: float = EVERY_S
) -> Iterator[None]:
    """Send the spans of the ``with`` block every few seconds, and the last ones at its end."""
    ended, wanted = threading.Event(), threading.Event()

    def deliver() -> None:
        if records := spans.drain():
            clock.renew()
            send(pb.SlotSpans(records=records, offset_s=clock.offset_s, error_s=min(clock.error_s, 1e9)))

    def run() -> None:
        while not ended.is_set():
            wanted.wait(every_s)
            wanted.clear()
            deliver()

    spans.flush = wanted.set
    thread = threading.Thread(target=run, name="spans", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        wanted.set()
        thread.join()
        deliver()
