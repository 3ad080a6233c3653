"""Grouping of workers: those of similar speed form a group, synchronous inside, free between the groups.

Groups are intervals of the workers sorted by their seconds per step: no worker waits for one outside its group.
We define all of this; see docs/algorithms/group-sync.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

SPREAD = 0.25  # share by which a machine may be slower than the fastest of its group
BAND = 0.1  # how far a worker may leave its group's band before that counts
MOST_GROUPS = 32  # that are considered
LOOKS = 2  # in a row that a worker must be outside of its band

StepSeconds = Sequence[float] | Mapping[int, float]
"""Seconds of one step, > 0, for workers 0, 1, ..., or by the worker's number."""

Groups = tuple[tuple[int, ...], ...]
"""Members of each group, ascending; the fastest group first."""


def cluster(seconds: StepSeconds, spread: float = SPREAD) -> Groups:
    """The smallest number of groups in which no worker is more than ``1 + spread`` times slower than another.

    Greedy from the fastest worker on, which is optimal on a line: every group starts where the one before had to end.

    Args:
        seconds: Seconds of one step of each worker.
        spread: >= 0; 0 puts workers of different speed into groups of their own.
    """
    order = _by_speed(seconds)
    borders = [0]
    for place, worker in enumerate(order):
        if seconds[worker] > (1 + spread) * seconds[order[borders[-1]]]:
            borders.append(place)
    return _cut(order, [*borders, len(order)])


def divide(seconds: StepSeconds, groups: int) -> Groups:
    """The intervals that minimise ``sum_g |g| * log(max_g / min_g)``, by dynamic programming over the sorted workers.

    Args:
        seconds: Seconds of one step of each worker.
        groups: How many, 1 to the number of workers.
    """
    return _cut(_by_speed(seconds), _borders(seconds, groups)[groups - 1])


def evenly(seconds: StepSeconds, groups: int) -> Groups:
    """Intervals of the sorted workers with the same number of them, give or take one; see :func:`divide`."""
    order = _by_speed(seconds)
    return _cut(order, [len(order) * group // groups for group in range(groups + 1)])


def choose(seconds: StepSeconds, spread: float = SPREAD) -> Groups:
    """The grouping with the least :func:`predicted_cost` among the tightest ones of each number of groups.

    No more groups are considered than :func:`cluster` needs. Of equally good ones the one with fewer groups.
    """
    order, most = _by_speed(seconds), min(len(cluster(seconds, spread)), MOST_GROUPS)
    candidates = [_cut(order, borders) for borders in _borders(seconds, most)]
    return min(candidates, key=lambda groups: (predicted_cost(groups, seconds, spread), len(groups)))


def predicted_cost(groups: Groups, seconds: StepSeconds, spread: float = SPREAD) -> float:
    """Predicted seconds per local batch, stretched by staleness; smaller is better.

    With equal local batches a group does ``|g|`` of them in the time of its slowest member; always busy groups that do
    not wait for each other miss ``G - 1`` updates on average, whatever their speeds::

        cost = (1 + spread / 2 * (G - 1)) / sum_g |g| / max_g(seconds)

    The factor makes two machines of ratio ``1 + spread`` as good together as apart, and so means the same as in
    :func:`cluster`. Batches that are adapted afterwards inside a group absorb what waiting is left.
    """
    rate = sum(len(group) / max(seconds[worker] for worker in group) for group in groups)
    return (1 + spread / 2 * (len(groups) - 1)) / rate


@dataclass
class Hysteresis:
    """Keeps a grouping as long as it fits: a look in which no worker left its group's band changes nothing.

    The band reaches from ``1 - BAND`` times the fastest to ``1 + BAND`` times the slowest member at the time of
    grouping, in units of the geometric mean of all workers: what slows all workers down moves none. A member that
    is gone is left out.

    Attributes:
        groups: As they are.
        seconds: Seconds of every worker's step when they were formed; by index.
    """

    groups: Groups
    seconds: StepSeconds
    _outside: int = field(default=0, init=False)

    def look(self, seconds: dict[int, float]) -> bool:
        """Whether a worker has now been outside for :data:`LOOKS` looks in a row.

        Args:
            seconds: Seconds of one step of each worker that lives and has been measured since the last look.
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
    """Whether other groups save more of the ``remaining_s`` seconds of training than the ``cost_s`` of the change."""
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
    """For each number of groups up to ``most`` where the tightest intervals of the sorted workers begin and end."""
    logs = np.log([seconds[worker] for worker in _by_speed(seconds)])
    count = len(logs)
    best = np.full(count + 1, np.inf)  # of the first n workers
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
