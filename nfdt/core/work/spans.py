"""Spans: what a process did from when to when, for the trace of its job. A ring keeps the latest ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

CAPACITY = 10_000  # spans of one process that are kept
KINDS = ("lease", "compute", "exchange", "wait", "evaluate", "end of epoch", "step", "apply", "lock wait")
LEASE, COMPUTE, EXCHANGE, WAIT, EVALUATE, END_OF_EPOCH, STEP, APPLY, LOCK_WAIT = range(len(KINDS))
STEPS, LEASES = range(2)  # tracks of a worker; those of a shard are the numbers of the workers
SPAN = np.dtype([("start", "<f8"), ("seconds", "<f4"), ("kind", "u1"), ("track", "<u2"), ("value", "<u4")])

Spans = npt.NDArray[np.void]


class SpanRing:
    """Latest spans of a process. Any thread may add one; the oldest are lost unless they are drained in time.

    Spans are tuples until then, because appending one takes a quarter of the time of setting a row of a NumPy array.

    Attributes:
        flush: Requests delivery of the spans so far and returns at once; does nothing where nobody delivers them.
    """

    def __init__(self) -> None:
        self.flush: Callable[[], None] = lambda: None
        self._spans: deque[tuple[int, float, float, int, int]] = deque(maxlen=CAPACITY)
        self._unix = time.time() - time.perf_counter()

    def add(self, kind: int, began: float, ended: float, value: int = 0, track: int = 0) -> None:
        """Add a span.

        Args:
            kind: Index in :data:`KINDS`.
            began: Its begin by ``time.perf_counter()``.
            ended: Its end.
            value: Number that belongs to it: a task, a step, a version.
            track: Row of the process in which it is drawn.
        """
        self._spans.append((kind, began, ended, value, track))

    def drain(self) -> bytes:
        """Remove all spans and return them as records of :data:`SPAN` in Unix time, oldest first."""
        found: list[Any] = []
        try:
            while True:
                kind, began, ended, value, track = self._spans.popleft()
                found.append((self._unix + began, ended - began, kind, track & 0xFFFF, value & 0xFFFFFFFF))
        except IndexError:
            return np.array(found, SPAN).tobytes()


def track_of(worker: str) -> int:
    """Return the track of a worker on a shard: the number at the end of its name.

    >>> track_of("worker-12")
    12
    """
    number = worker.rpartition("-")[2]
    return int(number) & 0xFFFF if number.isdecimal() else 0


def read_spans(records: Sequence[bytes]) -> Spans:
    """Return the latest :data:`CAPACITY` spans of consecutive deliveries, shape ``(n,)`` of :data:`SPAN`.

    Raises:
        ValueError: the bytes are no records.
    """
    return np.frombuffer(b"".join(records), SPAN)[-CAPACITY:]
