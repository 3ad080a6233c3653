"""The groups of a job's workers and the share of each group, decided from measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nfdt.core.specs.algorithm import explicit_groups, wanted_groups
from nfdt.core.specs.job import JobSpec
from nfdt.schedulers.group_shares import GroupShare, share_out
from nfdt.schedulers.grouping import Groups, Hysteresis, choose, divide, pays
from nfdt.schedulers.ring_network import RingLink, RingNetwork
from nfdt.schedulers.throughput import Speeds, StepTime

SHRINK_S = 5.0  # time for all members of a lost group to come back; then it goes on without the others
IMPASSABLE = RingLink(latency_s=1e6, s_per_byte=0.0)  # so slow that no group spans machines if it can be avoided


class GroupPlan:
    """Plan of groups and their shares, computed from measured steps without I/O.

    Args:
        spec: The job; ``workers`` is the number of members of all groups.
        network: Machines of the members and the cost of rings among them.

    Attributes:
        explicit: Groups that the job's options name; None if they are found by speed.
        exchange_s: Seconds of a group's exchange with the shards per step. It is part of every member's alpha. It
            changes nothing inside a group; the longer it takes, the less the groups differ.
        network: Machines of the members and the cost of rings among them; can be replaced when machines are known.
        spans_machines: Whether a group may have members on several machines.
    """

    def __init__(self, spec: JobSpec, network: RingNetwork | None = None) -> None:
        self.explicit = explicit_groups(spec.algorithm.groups, spec.cluster.workers)
        self.exchange_s = 0.0
        self.network = network or RingNetwork()
        self.spans_machines = True
        self._algorithm, self._batch = spec.algorithm, spec.fit.batch_size
        self._speeds = Speeds()
        self._hysteresis: Hysteresis | None = None

    @property
    def settled(self) -> bool:
        """Whether groups have been formed."""
        return self._hysteresis is not None

    def measured(self, member: str, rows: int, seconds: float) -> None:
        """Record the time of a member's step."""
        self._speeds.measured(member, rows, seconds)

    def ring_measured(self, members: Sequence[int], ring: Mapping[str, Any]) -> None:
        """Record the allreduce that a group has timed.

        Args:
            members: Members of the group.
            ring: ``gradient``, the bytes of a gradient, and ``bytes`` and ``seconds`` of the timed allreduce.
        """
        network = replace(self.network, size=int(ring["gradient"]))
        self.network = network.measured(members, int(ring["bytes"]), float(ring["seconds"]))

    def choose(self, living: Groups) -> Groups:
        """Return the groups that the live members should form."""
        if self.explicit is not None:
            return living
        count, seconds = wanted_groups(self._algorithm.groups), self._seconds(living, exchange=True)
        network = self.network if self.spans_machines else replace(self.network, between=IMPASSABLE)
        if count is None:
            return self.allowed(choose(seconds, network=network))
        return self.allowed(divide(seconds, min(count, len(seconds)), network))

    def allowed(self, groups: Groups) -> Groups:
        """Return the groups, divided by machine where a group may not span machines."""
        if self.spans_machines:
            return groups
        return tuple(part for members in groups for part in self.network.parts(members))

    def asked_for(self, members: Sequence[int]) -> bool:
        """Return whether the job's options name a group with these members, and perhaps others."""
        return any(set(members) <= set(group) for group in self.explicit or ())

    def settle(self, groups: Groups) -> None:
        """Record that these groups have been formed, and the current speeds."""
        self._hysteresis = Hysteresis(groups, self._seconds(groups))

    def review(self, living: Groups, remaining_s: float, cost_s: float) -> Groups | None:
        """Return other groups if speeds have changed and the regrouping pays, else None. Call it between two epochs.

        Args:
            living: Current groups without lost members.
            remaining_s: Estimated remaining seconds of training.
            cost_s: Seconds that the regrouping takes.
        """
        if self._hysteresis is None:
            return None
        groups, seconds = self.choose(living), self._seconds(living, exchange=True)
        moved = self._hysteresis.look(self._seconds(living))
        if not moved or self.explicit is not None:
            return None
        return groups if pays(living, groups, seconds, remaining_s, cost_s, self.network) else None

    def growing(
        self, living: Groups, returned: Sequence[int], remaining_s: float, cost_s: float
    ) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the groups that members without a group join where that pays, each with its members then.

        While a group is formed again its members do not train. A member joins the group that the job's options give it,
        else the smallest one.

        Args:
            living: Current groups without lost members.
            returned: Members that have a machine and no group.
            remaining_s: Estimated remaining seconds of training.
            cost_s: Seconds that forming a group takes.
        """
        after = {members: members for members in living}
        for member in returned:
            fitting = {old: tuple(sorted((*new, member))) for old, new in after.items()}
            fitting = {old: new for old, new in fitting.items() if self.allowed((new,)) == (new,)}
            if fitting:
                joined = min(fitting, key=lambda old: (not self.asked_for(fitting[old]), len(after[old]), old))
                after[joined] = fitting[joined]
        return {
            old: new
            for old, new in after.items()
            if (len(new) - len(old)) * remaining_s > len(new) * cost_s and new != old
        }

    def shares(self, groups: Groups) -> tuple[GroupShare, ...]:
        """Return the share of each group from its next epoch on."""
        algorithm = self._algorithm
        return share_out(
            groups,
            self._times(groups),
            self._batch,
            proportional=algorithm.batch_facts.follows_speed,
            least=algorithm.batch_min,
            most=algorithm.batch_max,
        )

    def _times(self, groups: Groups) -> dict[int, StepTime]:
        """Return the step time per member; unmeasured members get the mean."""
        members = [member for group in groups for member in group]
        found = {member: time for member in members if (time := self._speeds.of(str(member)).step_time) is not None}
        mean = sum(time.seconds(self._batch) for time in found.values()) / len(found) if found else 1.0
        times = {member: found.get(member, StepTime(0.0, mean / self._batch)) for member in members}
        return {m: StepTime(time.alpha_s + self.exchange_s, time.beta_s) for m, time in times.items()}

    def _seconds(self, groups: Groups, *, exchange: bool = False) -> dict[int, float]:
        """Return the seconds per step of the reference batch for each member, with or without the exchange."""
        less = 0.0 if exchange else self.exchange_s
        return {m: time.seconds(self._batch) - less for m, time in self._times(groups).items()}


def name_of(members: Sequence[int]) -> str:
    """Return the name of a group: ``0,1``."""
    return ",".join(map(str, members))


def groups_event(shares: Sequence[GroupShare], reason: str) -> dict[str, Any]:
    """Return groups and their shares as the data of an event."""
    return {"groups": [_described(share) for share in shares], "reason": reason}


def _described(share: GroupShare) -> Mapping[str, Any]:
    return {
        "members": list(share.members),
        "rows": list(share.rows),
        "step_s": round(share.step_s, 6),
        "staleness": round(share.staleness, 3),
        "rate": round(share.rate, 6),
    }
