"""Grouping of workers by similar speed: synchronous within a group, free between the groups.

Groups are intervals of the workers sorted by their seconds per step: no worker waits for one outside its group.
We define all of this; see docs/algorithms/group-sync.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SPREAD = 0.25  # fraction by which a machine may be slower than the fastest of its group
BAND = 0.1  # fraction by which a worker may leave its group's band without effect
MOST_GROUPS = 32  # maximum number of groups considered
LOOKS = 2  # consecutive reviews with a worker outside its band before regrouping

StepSeconds = Sequence[float] | Mapping[int, float]
"""Seconds of one step, > 0, for workers 0, 1, ..., or by the worker's number."""

Groups = tuple[tuple[int, ...], ...]
"""Members of each group, ascending; the fastest group first."""


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


def divide(seconds: StepSeconds, groups: int) -> Groups:
    """Return the intervals of sorted workers that minimise ``sum_g |g| * log(max_g / min_g)``, by dynamic programming.

    Args:
        seconds: Seconds of one step of each worker.
        groups: Number of groups, 1 to the number of workers.
    """
    return _cut(_by_speed(seconds), _borders(seconds, groups)[groups - 1])


def evenly(seconds: StepSeconds, groups: int) -> Groups:
    """Return intervals of the sorted workers whose sizes differ by one at most; see :func:`divide`."""
    order = _by_speed(seconds)
    return _cut(order, [len(order) * group // groups for group in range(groups + 1)])


def choose(seconds: StepSeconds, spread: float = SPREAD) -> Groups:
    """Return the grouping with the least :func:`predicted_cost` among the tightest ones of each number of groups.

    No more groups are considered than :func:`cluster` needs. Ties are resolved in favour of fewer groups.
    """
    order, most = _by_speed(seconds), min(len(cluster(seconds, spread)), MOST_GROUPS)
    candidates = [_cut(order, borders) for borders in _borders(seconds, most)]
    return min(candidates, key=lambda groups: (predicted_cost(groups, seconds, spread), len(groups)))


def predicted_cost(groups: Groups, seconds: StepSeconds, spread: float = SPREAD) -> float:
    """Return the predicted seconds per local batch, increased by staleness; smaller is better.

    With equal local batches a group computes ``|g|`` of them in the time of its slowest member. Groups that are always
    busy and do not wait for each other miss ``G - 1`` updates on average, whatever their speeds::

        cost = (1 + spread / 2 * (G - 1)) / sum_g |g| / max_g(seconds)

    The factor makes one group of two machines of ratio ``1 + spread`` as good as two groups, so ``spread`` has the
    meaning that it has in :func:`cluster`. Batches that are adapted later within a group absorb the remaining waiting.
    """
    rate = sum(len(group) / max(seconds[worker] for worker in group) for group in groups)
    return (1 + spread / 2 * (len(groups) - 1)) / rate


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
        now = _relative([seconds[worker] for worker in known])
        then = _relative([self.seconds[worker] for worker in known])
        current, formed = dict(zip(known, now, strict=True)), dict(zip(known, then, strict=True))
        self._outside = self._outside + 1 if any(self._left(g, current, formed) for g in self.groups) else 0
        return self._outside >= LOOKS

    @staticmethod
    def _left(group: tuple[int, ...], now: dict[int, float], then: dict[int, float]) -> bool:
        members = [worker for worker in group if worker in now]
        if not members:
            return False
        low, high = min(then[w] for w in members) * (1 - BAND), max(then[w] for w in members) * (1 + BAND)
        return any(not low <= now[w] <= high for w in members)


def pays(now: Groups, then: Groups, seconds: StepSeconds, remaining_s: float, cost_s: float) -> bool:
    """Whether other groups save more of the ``remaining_s`` seconds of training than the change costs (``cost_s``)."""
    if now == then:
        return False
    saved = 1 - predicted_cost(then, seconds) / predicted_cost(now, seconds)
    return saved * remaining_s > cost_s


def _by_speed(seconds: StepSeconds) -> list[int]:
    workers = seconds if isinstance(seconds, Mapping) else range(len(seconds))
    return sorted(workers, key=lambda worker: (seconds[worker], worker))


def _cut(order: Sequence[int], borders: Sequence[int]) -> Groups:
    return tuple(tuple(sorted(order[a:b])) for a, b in zip(borders, borders[1:], strict=False))


def _borders(seconds: StepSeconds, most: int) -> list[list[int]]:
    """Return the borders of the tightest intervals of the sorted workers, for each number of groups up to ``most``."""
    logs = np.log([seconds[worker] for worker in _by_speed(seconds)])
    count = len(logs)
    best = np.full(count + 1, np.inf)  # least cost of the first n workers
    best[0] = 0.0
    starts: list[list[int]] = []
    found = []
    for _ in range(most):
        reach, start = np.full(count + 1, np.inf), [0] * (count + 1)
        for stop in range(1, count + 1):
            costs = best[:stop] + np.arange(stop, 0, -1) * (logs[stop - 1] - logs[:stop])
            start[stop] = int(np.argmin(costs))
            reach[stop] = costs[start[stop]]
        best = reach
        starts.append(start)
        borders = [count]
        for earlier in reversed(starts):
            borders.append(earlier[borders[-1]])
        found.append(borders[::-1])
    return found


def _relative(seconds: Sequence[float]) -> list[float]:
    mean = math.exp(sum(map(math.log, seconds)) / max(len(seconds), 1))
    return [value / mean for value in seconds]
