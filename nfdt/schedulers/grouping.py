"""Grouping of workers by similar speed: synchronous within a group, free between the groups.

Groups are intervals of the workers sorted by their seconds per step: no worker waits for one outside its group.
Where workers are on several machines, an interval is divided by machine if its exchange between machines costs more
than the staleness of more groups. We define all of this; see docs/algorithms/group-sync.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nfdt.schedulers.ring_network import RingNetwork, best_cuts, divisions, local_batches_per_s

SPREAD = 0.25  # fraction by which a machine may be slower than the fastest of its group
BAND = 0.1  # fraction by which a worker may leave its group's band without effect
MOST_GROUPS = 32  # maximum number of groups considered
ONE_PLACE = RingNetwork()  # all workers on one machine, or their machines unknown
LOOKS = 2  # consecutive reviews with a worker outside its band before regrouping

StepSeconds = Sequence[float] | Mapping[int, float]
"""Seconds of one step, > 0, for workers 0, 1, ..., or by the worker's number."""

Groups = tuple[tuple[int, ...], ...]
"""Members of each group by rank: ascending, machine by machine; the fastest group first."""


def cluster(seconds: StepSeconds, spread: float = SPREAD) -> Groups:
    """Return the fewest groups in which no worker is more than ``1 + spread`` times slower than another.

    The search is greedy from the fastest worker on, which is optimal on a line: each group starts where the previous
    one had to end.

    Args:
        seconds: Seconds of one step of each worker.
        spread: Allowed spread of speeds, >= 0; 0 separates workers of different speed.
    """
    order = _by_speed(seconds)
    borders = [0]
    for place, worker in enumerate(order):
        if seconds[worker] > (1 + spread) * seconds[order[borders[-1]]]:
            borders.append(place)
    return _cut(order, [*borders, len(order)])


def divide(seconds: StepSeconds, groups: int, network: RingNetwork = ONE_PLACE) -> Groups:
    """Return this number of groups: the intervals of sorted workers that minimise ``sum_g |g| * log(max_g / min_g)``.

    On several machines it is the grouping with the least :func:`predicted_cost` among these intervals and those that
    fewer intervals, divided by machine, make.

    Args:
        seconds: Seconds of one step of each worker.
        groups: Number of groups, 1 to the number of workers.
        network: Machines of the workers.
    """
    tightest = _tightest(seconds, groups, network)
    if not network.several:
        return tightest[-1]
    found = [divided[groups] for each in tightest if groups in (divided := by_machine(each, seconds, network))]
    return min(found, key=lambda each: predicted_cost(each, seconds, network=network), default=tightest[-1])


def evenly(seconds: StepSeconds, groups: int, network: RingNetwork = ONE_PLACE) -> Groups:
    """Return intervals of the workers, sorted by machine and then by speed, whose sizes differ by one at most."""
    order = sorted(_by_speed(seconds), key=network.machine)
    return _cut(order, [len(order) * group // groups for group in range(groups + 1)], network)


def choose(seconds: StepSeconds, spread: float = SPREAD, network: RingNetwork = ONE_PLACE) -> Groups:
    """Return the grouping with the least :func:`predicted_cost` among the tightest ones of each number of groups.

    No more groups are considered than :func:`cluster` needs, and on several machines these divided by machine. Ties are
    resolved in favour of fewer groups.
    """
    most = min(len(cluster(seconds, spread)), MOST_GROUPS)
    candidates = list(_tightest(seconds, most, network))
    if network.several:
        candidates += [each for found in candidates for each in by_machine(found, seconds, network).values()]
    return min(candidates, key=lambda groups: (predicted_cost(groups, seconds, spread, network), len(groups)))


def predicted_cost(
    groups: Groups, seconds: StepSeconds, spread: float = SPREAD, network: RingNetwork = ONE_PLACE
) -> float:
    """Return the predicted seconds per local batch, increased by staleness; smaller is better.

    With equal local batches a group computes ``|g|`` of them in the time of its slowest member and of what its exchange
    takes longer than on one machine. Groups that are always busy and do not wait for each other miss ``G - 1`` updates
    on average, whatever their speeds::

        cost = (1 + spread / 2 * (G - 1)) / sum_g |g| / (max_g(seconds) + extra_g)

    The factor makes one group of two machines of ratio ``1 + spread`` as good as two groups, so ``spread`` has the
    meaning that it has in :func:`cluster`. Batches that are adapted later within a group absorb the remaining waiting.
    """
    rate = sum(local_batches_per_s(group, seconds, network) for group in groups)
    return (1 + spread / 2 * (len(groups) - 1)) / rate


def by_machine(groups: Groups, seconds: StepSeconds, network: RingNetwork) -> dict[int, Groups]:
    """Return for each number of groups the fastest division of these groups by machine; members of a machine stay.

    Args:
        groups: Groups to divide; each stays whole or is divided between machines.
        seconds: Seconds of one step of each worker.
        network: Machines of the workers.
    """
    best: dict[int, tuple[float, Groups]] = {0: (0.0, ())}
    for group in groups:
        options = divisions(sorted(group, key=_key(seconds, network)), seconds, network, MOST_GROUPS)
        longer: dict[int, tuple[float, Groups]] = {}
        for count, (rate, chosen) in best.items():
            for more, (own, division) in options.items():
                total = count + more
                if total <= MOST_GROUPS and (total not in longer or rate + own > longer[total][0]):
                    longer[total] = (rate + own, chosen + division)
        best = longer
    return {count: chosen for count, (_, chosen) in best.items()}


@dataclass
class Hysteresis:
    """Hysteresis of a grouping: a review in which no worker left its group's band changes nothing.

    The band reaches from ``1 - BAND`` times the fastest to ``1 + BAND`` times the slowest member at the time of
    grouping. The unit is the geometric mean of all workers, so a slowdown of all workers has no effect. Lost members
    are left out.

    Attributes:
        groups: Current groups.
        seconds: Seconds of every worker's step when the groups were formed, by index.
    """

    groups: Groups
    seconds: StepSeconds
    _outside: int = field(default=0, init=False)

    def look(self, seconds: dict[int, float]) -> bool:
        """Return whether a worker has been outside its band for :data:`LOOKS` consecutive reviews.

        Args:
            seconds: Seconds of one step of each live worker that has been measured since the last review.
        """
        known = sorted(seconds)
        current = _relative({worker: seconds[worker] for worker in known})
        formed = _relative({worker: self.seconds[worker] for worker in known})
        self._outside = self._outside + 1 if any(self._left(g, current, formed) for g in self.groups) else 0
        return self._outside >= LOOKS

    @staticmethod
    def _left(group: tuple[int, ...], now: dict[int, float], then: dict[int, float]) -> bool:
        members = [worker for worker in group if worker in now]
        if not members:
            return False
        low, high = min(then[w] for w in members) * (1 - BAND), max(then[w] for w in members) * (1 + BAND)
        return any(not low <= now[w] <= high for w in members)


def pays(
    now: Groups,
    then: Groups,
    seconds: StepSeconds,
    remaining_s: float,
    cost_s: float,
    network: RingNetwork = ONE_PLACE,
) -> bool:
    """Whether other groups save more of the ``remaining_s`` seconds of training than the change costs (``cost_s``)."""
    if now == then:
        return False
    costs = [predicted_cost(groups, seconds, network=network) for groups in (now, then)]
    return (1 - costs[1] / costs[0]) * remaining_s > cost_s


def _by_speed(seconds: StepSeconds, network: RingNetwork = ONE_PLACE) -> list[int]:
    workers = seconds if isinstance(seconds, Mapping) else range(len(seconds))
    return sorted(workers, key=_key(seconds, network))


def _key(seconds: StepSeconds, network: RingNetwork) -> Callable[[int], tuple[float, str, int]]:
    return lambda worker: (seconds[worker], network.machine(worker), worker)


def _tightest(seconds: StepSeconds, most: int, network: RingNetwork) -> list[Groups]:
    """Return the tightest intervals of the sorted workers, for each number of groups up to ``most``."""
    order = _by_speed(seconds, network)
    logs = np.log([seconds[worker] for worker in order])
    count = len(logs)
    costs = np.full((count + 1, count + 1), np.inf)  # by start and stop
    for stop in range(1, count + 1):
        costs[:stop, stop] = np.arange(stop, 0, -1) * (logs[stop - 1] - logs[:stop])
    return [_cut(order, borders, network) for _, borders in best_cuts(-costs, most)]


def _cut(order: Sequence[int], borders: Sequence[int], network: RingNetwork = ONE_PLACE) -> Groups:
    return tuple(network.ordered(order[a:b]) for a, b in zip(borders, borders[1:], strict=False))


def _relative(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds of each worker in units of their geometric mean."""
    mean = math.exp(sum(map(math.log, seconds.values())) / max(len(seconds), 1))
    return {worker: value / mean for worker, value in seconds.items()}
