"""Cost of an allreduce ring on one machine and between machines, and the division of workers between machines.

An allreduce of n ranks takes 2 (n - 1) steps, in each of which every rank sends one n-th of the bytes to the next rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

Division = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RingLink:
    """Cost of one step of a ring: ``latency_s + bytes * s_per_byte``.

    Attributes:
        latency_s: Fixed seconds of a step.
        s_per_byte: Seconds per byte that a rank sends.
    """

    latency_s: float
    s_per_byte: float

    @classmethod
    def fitted(cls, measured: Iterable[tuple[int, int, float]]) -> RingLink:
        """Return the cost with the least squares of relative errors.

        Args:
            measured: Ranks, bytes and seconds of each allreduce.
        """
        rows = [(2 * (n - 1) / s, 2 * (n - 1) / n * size / s) for n, size, s in measured]
        found, *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
        latency_s, s_per_byte = (max(0.0, float(value)) for value in found)
        return cls(latency_s, s_per_byte)

    def allreduce_s(self, ranks: int, size: int) -> float:
        """Return the seconds of an allreduce of ``size`` bytes: ``2 (n-1) latency + 2 (n-1)/n size s_per_byte``."""
        return 2 * (ranks - 1) * (self.latency_s + size / ranks * self.s_per_byte)

    def scaled(self, factor: float) -> RingLink:
        """Return the cost with all seconds multiplied by a factor."""
        return RingLink(self.latency_s * factor, self.s_per_byte * factor)


# Measured by scripts/bench allreduce; docs/benchmarks.md has the figures. NETWORK is a link of 1 Gbit/s.
ONE_MACHINE = RingLink(latency_s=0.00054, s_per_byte=1.65e-9)
NETWORK = RingLink(latency_s=0.0, s_per_byte=9.0e-9)


@dataclass(frozen=True)
class RingNetwork:
    """Machines of a job's workers, and the cost of rings among them.

    Attributes:
        machines: Name of each worker's machine, by the worker's number; empty or missing: unknown. A worker of unknown
            machine counts as being on the machine of the others.
        size: Bytes of a gradient.
        local: Ring on one machine.
        between: Ring that spans machines.
    """

    machines: tuple[str, ...] = ()
    size: int = 0
    local: RingLink = ONE_MACHINE
    between: RingLink = NETWORK

    @property
    def several(self) -> bool:
        """Whether the workers are on more than one machine."""
        return len({name for name in self.machines if name}) > 1

    def machine(self, worker: int) -> str:
        """Return the name of a worker's machine; empty: unknown."""
        return self.machines[worker] if worker < len(self.machines) else ""

    def spans(self, members: Iterable[int]) -> bool:
        """Whether these workers are on more than one machine."""
        return len({name for name in map(self.machine, members) if name}) > 1

    def ordered(self, members: Iterable[int]) -> tuple[int, ...]:
        """Return the members by rank: machine by machine, so that each link carries one message per step."""
        return tuple(sorted(members, key=lambda worker: (self.machine(worker), worker)))

    def parts(self, members: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the members of each machine; machines and members in the order of first occurrence."""
        found: dict[str, list[int]] = {}
        for worker in members:
            found.setdefault(self.machine(worker), []).append(worker)
        return [tuple(part) for part in found.values()]

    def allreduce_s(self, members: Collection[int]) -> float:
        """Return the seconds of an allreduce among the members; 0 for fewer than two."""
        if len(members) < 2:
            return 0.0
        link = self.between if self.spans(members) else self.local
        return link.allreduce_s(len(members), self.size)

    def extra_s(self, members: Collection[int]) -> float:
        """Return the seconds by which an allreduce takes longer than among as many workers of one machine."""
        return self.crossing_s(len(members)) if self.spans(members) else 0.0

    def crossing_s(self, ranks: int) -> float:
        """Return the seconds by which an allreduce of so many ranks takes longer between machines than on one."""
        return max(0.0, self.between.allreduce_s(ranks, self.size) - self.local.allreduce_s(ranks, self.size))

    def measured(self, members: Collection[int], size: int, seconds: float) -> RingNetwork:
        """Return the network in which this ring takes as long as measured; other rings of its kind change likewise.

        Args:
            members: Members of the ring.
            size: Bytes of the measured allreduce.
            seconds: Its seconds; ignored unless > 0, and for fewer than two members.
        """
        spans = self.spans(members)
        link = self.between if spans else self.local
        predicted_s = link.allreduce_s(len(members), size)
        if len(members) < 2 or seconds <= 0 or predicted_s <= 0:
            return self
        link = link.scaled(seconds / predicted_s)
        return replace(self, between=link) if spans else replace(self, local=link)


def local_batches_per_s(
    group: Sequence[int], seconds: Sequence[float] | Mapping[int, float], network: RingNetwork
) -> float:
    """Return the local batches per second of a group: it waits for its slowest member and for other machines."""
    return len(group) / (max(seconds[worker] for worker in group) + network.extra_s(group))


def divisions(
    group: Sequence[int], seconds: Sequence[float] | Mapping[int, float], network: RingNetwork, most: int
) -> dict[int, tuple[float, Division]]:
    """Return for each number of parts, up to ``most``, the highest rate and its division.

    The workers of a machine stay together. The machines form a line, by their first worker in ``group``, which is cut.

    Args:
        group: Workers, the fastest first.
        seconds: Seconds of one step of each worker.
        network: Machines of the workers.
        most: Maximum number of parts.
    """
    blocks = network.parts(group)
    found = {}
    for rate, cuts in best_cuts(_rates(blocks, seconds, network), min(most, len(blocks))):
        division = tuple(
            network.ordered(worker for block in blocks[a:b] for worker in block)
            for a, b in zip(cuts, cuts[1:], strict=False)
        )
        found[len(division)] = (rate, division)
    return found


def best_cuts(gains: np.ndarray, most: int) -> list[tuple[float, list[int]]]:
    """Cut a line of n places into intervals with the highest sum of gains, by dynamic programming.

    Args:
        gains: Gain of the interval from each start to each stop, shape ``(n + 1, n + 1)``; minus infinity where there
            is none.
        most: Maximum number of intervals.

    Returns:
        For each number of intervals from 1 on: the sum, and the borders from 0 to n.
    """
    best = np.full(len(gains), -np.inf)  # highest sum of the first places
    best[0] = 0.0
    starts: list[list[int]] = []
    found = []
    for _ in range(most):
        sums = best[:, None] + gains
        starts.append([int(start) for start in np.argmax(sums, axis=0)])
        best = np.max(sums, axis=0)
        borders = [len(gains) - 1]
        for earlier in reversed(starts):
            borders.append(earlier[borders[-1]])
        found.append((float(best[-1]), borders[::-1]))
    return found


def _rates(
    blocks: Sequence[Sequence[int]], seconds: Sequence[float] | Mapping[int, float], network: RingNetwork
) -> np.ndarray:
    """Return the rate of the machines from each start to each stop as one group; minus infinity where there is none."""
    count = len(blocks)
    rates = np.full((count + 1, count + 1), -np.inf)
    slowest = [max(seconds[worker] for worker in block) for block in blocks]
    names = [network.machine(block[0]) for block in blocks]
    for start in range(count):
        members, longest, spanned = 0, 0.0, set()
        for stop in range(start + 1, count + 1):
            members, longest = members + len(blocks[stop - 1]), max(longest, slowest[stop - 1])
            spanned |= {names[stop - 1]} - {""}
            extra_s = network.crossing_s(members) if len(spanned) > 1 else 0.0
            rates[start, stop] = members / (longest + extra_s)
    return rates
