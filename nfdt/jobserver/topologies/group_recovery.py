"""Groups that have lost a rank: formed again with the same members, or with those whose machines are still there.

Between two epochs, members that a group went on without join it again, or another one, as soon as there are slots.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nfdt.coordinator.group_plan import SHRINK_S, name_of
from nfdt.jobserver.job_log import JobLog
from nfdt.launch.ring import Ring, RingMaker

Members = tuple[int, ...]
MOST_ATTEMPTS = 3  # consecutive number of rings of a group that end before they have trained a step


@dataclass
class GroupRecovery:
    """Recovery of lost groups. Members keep their machines, where fresh processes replace those of the lost ring.

    Attributes:
        rings: Maker of the job's rings.
        job_log: Log of the job.
    """

    rings: RingMaker
    job_log: JobLog
    _since: dict[Members, float] = field(default_factory=dict)
    _attempts: Counter[Members] = field(default_factory=Counter)

    @property
    def forming(self) -> list[Members]:
        """Groups that are forming again."""
        return list(self._since)

    def form_again(self, members: Members, now: float, *, trained: bool) -> bool:
        """Return whether a group whose ring has ended should be formed again; ``trained``: the ring has made a step."""
        self._since.pop(members, None)
        if trained:
            self._attempts.pop(members, None)
        if self._attempts[members] >= MOST_ATTEMPTS:
            return False
        self._attempts[members] += 1
        self._since[members] = now
        self.job_log.write("info", f"Group {name_of(members)} is formed again; it goes on from the shards' weights.")
        return True

    def shrink(self, members: Members, ring: Ring, now: float) -> Members:
        """Return the members with which a group goes on: fewer, if some have had no slot for too long."""
        if members not in self._since or not ring.awaited_slots or now - self._since[members] < SHRINK_S:
            return members
        rest = self.rings.reachable(members)
        if not rest or rest == members:
            return members
        self._attempts[rest] = self._attempts.pop(members)
        self._since[rest] = self._since.pop(members)
        lost = ", ".join(str(member) for member in members if member not in rest)
        self.job_log.write("warning", f"Group {name_of(members)} goes on without {lost}: their machines offer no slot.")
        return rest

    def grow(self, members: Members, grown: Members, now: float) -> None:
        """Record that a group is formed again with more members."""
        self._since[grown] = now
        self._attempts[grown] = 0
        joining = ", ".join(str(member) for member in grown if member not in members)
        self.job_log.write("info", f"Group {name_of(members)} is formed again with {joining}: slots are free.")

    def done(self, members: Members) -> None:
        """Record that a group is ready to train again."""
        del self._since[members]
