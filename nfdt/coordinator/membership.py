"""Who takes part in a job: pure, with time passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Member:
    """One worker of the job.

    Attributes:
        name: Unique within the job while the worker lives.
        index: Its number: which emulation, seed and part of a round it gets.
        seen_at: When it was last heard of, in seconds of the job's clock.
        ready: It has asked for work: its model is built.
        epoch: The epoch it has begun last; None before.
        leased_at: When it got the tasks it holds.
        in_flight: Those of them that it has begun, and need not be told again.
        pulls: Whether it was told to pull weights before it begins what it holds, and after that.
        released: It was told to leave; its end is no loss.
    """

    name: str
    index: int
    seen_at: float
    ready: bool = False
    epoch: int | None = None
    leased_at: float = 0.0
    in_flight: frozenset[int] = frozenset()
    pulls: tuple[bool, bool] = (False, False)
    released: bool = False


class Membership:
    """The living workers, and since when there are none."""

    def __init__(self, wanted: int, now: float) -> None:
        self._wanted = wanted
        self._members: dict[str, Member] = {}
        self._ready: list[Member] | None = None  # sorted; None: to be found anew
        self._ready_count = 0
        self.alone_since: float | None = now
        self.first_joined_at: float | None = None
        self.last_loss = ""

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: str) -> Member | None:
        """The member of this name, if it lives."""
        return self._members.get(worker)

    def join(self, worker: str, index: int, now: float) -> Member:
        """A worker takes part from now on."""
        member = self._members[worker] = Member(worker, index, now)
        self._ready = None
        self.alone_since = None
        if self.first_joined_at is None:
            self.first_joined_at = now
        return member

    def leave(self, worker: str, reason: str, now: float) -> Member | None:
        """A worker is gone; None if it was not there."""
        member = self._members.pop(worker, None)
        if member is None:
            return None
        self._ready = None
        self._ready_count -= member.ready
        self.last_loss = f"{worker}: {reason}"
        self._wanted = max(1, self._wanted - 1)
        if not self._members:
            self.alone_since = now
        return member

    def is_ready(self, member: Member) -> None:
        """It has asked for work: its model is built."""
        self._ready_count += not member.ready
        member.ready, self._ready = True, None

    def ready(self) -> list[Member]:
        """Members whose model is built, by index; not to be changed."""
        if self._ready is None:
            self._ready = sorted((m for m in self._members.values() if m.ready), key=lambda m: (m.index, m.name))
        return self._ready

    def all(self) -> list[Member]:
        """Everybody who lives."""
        return list(self._members.values())

    def expect(self, count: int) -> None:
        """The next epoch waits for so many, who are still to join."""
        self._wanted, self.first_joined_at = count, None

    def in_epoch(self, epoch: int) -> list[Member]:
        """Members that have begun this epoch."""
        return [m for m in self._members.values() if m.epoch == epoch]

    def silent(self, now: float, timeout_s: float) -> list[Member]:
        """Members not heard of for longer than ``timeout_s``."""
        return [m for m in self._members.values() if not m.released and now - m.seen_at > timeout_s]

    def may_begin(self, now: float, start_timeout_s: float) -> bool:
        """Whether everybody who is wanted (and not lost since) is ready, or somebody is and time is up."""
        if self._ready_count >= self._wanted:
            return True
        waited = now - self.first_joined_at if self.first_joined_at is not None else 0.0
        return self._ready_count > 0 and waited >= start_timeout_s

    def anybody_will_do(self) -> None:
        """Training has begun: from now on anybody who is there is enough."""
        self._wanted = 1
