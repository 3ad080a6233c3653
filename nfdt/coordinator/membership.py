"""The workers of a job. Time is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

LATE_S = 1.0  # least time after which a worker that was to be done is late


@dataclass
class Member:
    """One worker of the job.

    Attributes:
        name: Name of the worker, unique within the job while the worker lives.
        index: Number that determines its random seeds and its part of a round.
        seen_at: Time of its last call, or of the last look at one that waits, in seconds of the job's clock.
        ready: Whether it has requested work: its model is built.
        epoch: Number of the epoch that it began last; None before the first.
        leased_at: Time at which it begins the tasks that it holds: when it got them, or when it is free.
        free_at: Time at which it has finished the task that it computed at its last report, or that of the report.
        ahead: Number of the held task with whose begin it requests more; None: it has computed them all when it does.
        in_flight: Numbers of the held tasks that it has begun; they are not sent again.
        early: Number of rows that it has computed of its first task of the next epoch: all it held before is pushed.
        pulls: Whether it pulls weights before it begins the tasks it holds, and after them.
        released: Whether it may leave; its end is then not reported as a loss.
        heard_at: Time of the last sign of life of its process; None where processes give none.
        suspected: Whether a sign of life is overdue: others go on without it until it is heard again, or lost.
        overtaken: Whether another worker has finished a task that it still computes.
    """

    name: str
    index: int
    seen_at: float
    ready: bool = False
    epoch: int | None = None
    leased_at: float = 0.0
    free_at: float = 0.0
    ahead: int | None = None
    in_flight: frozenset[int] = frozenset()
    early: int = 0
    pulls: tuple[bool, bool] = (False, False)
    released: bool = False
    heard_at: float | None = None
    suspected: bool = False
    overtaken: bool = False

    def is_late(self, expected_s: float | None, now: float) -> bool:
        """Whether others may take the tasks that it holds, which were expected to take so long; None: unknown."""
        return self.suspected or (not self.early and now > self.late_at(expected_s))

    def late_at(self, expected_s: float | None) -> float:
        """Return the time after which it is late, unless it is suspected before."""
        return math.inf if expected_s is None else self.leased_at + expected_s + max(expected_s, LATE_S)


class Membership:
    """The live workers of a job, and the time since which there have been none."""

    def __init__(self, wanted: int, now: float) -> None:
        self._wanted = wanted
        self._members: dict[str, Member] = {}
        self._ready: list[Member] | None = None  # sorted; None: to be computed again
        self._ready_count = 0
        self.alone_since: float | None = now
        self.first_joined_at: float | None = None
        self.last_loss = ""
        self.missing = 0  # rises with each worker that leaves or is suspected

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: str) -> Member | None:
        """Return the live member of this name, or None."""
        return self._members.get(worker)

    def join(self, worker: str, index: int, now: float) -> Member:
        """Add a worker."""
        member = self._members[worker] = Member(worker, index, now)
        self._ready = None
        self.alone_since = None
        if self.first_joined_at is None:
            self.first_joined_at = now
        return member

    def leave(self, worker: str, reason: str, now: float) -> Member | None:
        """Remove a worker and return it; None if it was not a member."""
        member = self._members.pop(worker, None)
        if member is None:
            return None
        self._ready = None
        self.missing += 1
        self._ready_count -= member.ready
        self.last_loss = f"{worker}: {reason}"
        self._wanted = max(1, self._wanted - 1)
        if not self._members:
            self.alone_since = now
        return member

    def set_ready(self, member: Member) -> None:
        """Record that a member has built its model and requested work."""
        self._ready_count += not member.ready
        member.ready, self._ready = True, None

    def ready(self) -> list[Member]:
        """Return the members whose model is built, by index; the list is read only."""
        if self._ready is None:
            self._ready = sorted((m for m in self._members.values() if m.ready), key=lambda m: (m.index, m.name))
        return self._ready

    def ready_names(self) -> list[str]:
        """Return the names of the members whose model is built, by index."""
        return [member.name for member in self.ready()]

    def all(self) -> list[Member]:
        """Return all live members."""
        return list(self._members.values())

    def expect(self, count: int) -> None:
        """Make the next epoch wait for ``count`` workers that are still to join."""
        self._wanted, self.first_joined_at = count, None

    def in_epoch(self, epoch: int) -> list[Member]:
        """Return the members that have begun this epoch."""
        return [m for m in self._members.values() if m.epoch == epoch]

    def silent(self, now: float, timeout_s: float) -> list[Member]:
        """Return the members whose last call is longer ago than ``timeout_s``."""
        return [m for m in self._members.values() if not m.released and now - m.seen_at > timeout_s]

    def suspect(self, now: float, limit_s: float) -> None:
        """Suspect the members that give signs of life, the last of them longer ago than ``limit_s``."""
        for member in self._members.values():
            suspected = member.heard_at is not None and now - member.heard_at > limit_s
            self.missing += suspected and not member.suspected
            member.suspected = suspected

    def failure(self, now: float, start_timeout_s: float) -> str | None:
        """Return the reason why the job fails if it has had no workers for too long, else None."""
        if self.alone_since is None or now - self.alone_since < start_timeout_s:
            return None
        loss = self.last_loss
        what = f"All workers are gone; the last was {loss}." if loss else "No worker has joined."
        return f"{what} Nobody joined within {start_timeout_s:g} s. Start workers, then submit the job again."

    def interrupted(self, now: float) -> None:
        """Restart every timeout, and forget the tasks that were begun: the shards were away."""
        for member in self._members.values():
            member.seen_at, member.in_flight, member.early = now, frozenset(), 0
        self.alone_since = None if self._members else now

    def may_begin(self, now: float, start_timeout_s: float) -> bool:
        """Whether all expected workers (without lost ones) are ready, or some are and the timeout has passed."""
        if self._ready_count >= self._wanted:
            return True
        waited = now - self.first_joined_at if self.first_joined_at is not None else 0.0
        return self._ready_count > 0 and waited >= start_timeout_s

    def accept_any_number(self) -> None:
        """Require only one worker from now on, because training has begun."""
        self._wanted = 1
