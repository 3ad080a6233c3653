"""Worlds that a rank in a worker slot joins one after the other, as the job server forms them."""

from __future__ import annotations

import queue
from collections.abc import Callable

from nfdt.core.wire import workers_pb2 as pb


class RankWorlds:
    """Messages of the server about the worlds of one rank; the thread that receives them calls the first two methods.

    Attributes:
        ring: Name of the ring; "" for a slot that is no rank.
        leaving: Whether this rank shall leave its world at the next commit.
        broken: Whether it shall leave its world at once.
        break_off: Ends the operations of the current world on this rank.
    """

    def __init__(self) -> None:
        self.ring = ""
        self.leaving = self.broken = False
        self.break_off: Callable[[], None] = lambda: None
        self._next: queue.SimpleQueue[pb.RankAssignment] = queue.SimpleQueue()

    def announce(self, assignment: pb.RankAssignment) -> None:
        """Record this rank's place in the next world."""
        self.leaving = self.broken = False
        self._next.put(assignment)

    def leave(self, *, at_commit: bool) -> None:
        """Record that this rank shall leave its world."""
        self.leaving = True
        if not at_commit:
            self.broken = True
            self.break_off()

    def await_next(self) -> pb.RankAssignment:
        """Return this rank's place in the next world, after waiting for it."""
        return self._next.get()
