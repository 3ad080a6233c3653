"""Division of one group of workers between machines: for each number of parts the one with the highest rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nfdt.schedulers.ring_network import RingNetwork

Division = tuple[tuple[int, ...], ...]


def local_batches_per_s(
    group: Sequence[int], seconds: Sequence[float] | Mapping[int, float], network: RingNetwork
) -> float:
    """Return the local batches per second of a group: it waits for its slowest member and for other machines."""
    return len(group) / (max(seconds[worker] for worker in group) + network.extra_s(group))


def divisions(
    group: Sequence[int], seconds: Sequence[float] | Mapping[int, float], network: RingNetwork, most: int
) -> dict[int, tuple[float, Division]]:
    """Return for each number of parts, up to ``most``, the highest rate and its division.

    The workers of a machine stay together. The machines form a line, by their first worker in ``group``, which is cut
    by dynamic programming.

    Args:
        group: Workers, the fastest first.
        seconds: Seconds of one step of each worker.
        network: Machines of the workers.
        most: Maximum number of parts.
    """
    blocks = network.parts(group)
    rates = _rates(blocks, seconds, network)
    count = len(blocks)
    best = np.full(count + 1, -np.inf)  # highest rate of the first n machines
    best[0] = 0.0
    starts: list[list[int]] = []
    found = {}
    for number in range(1, min(most, count) + 1):
        sums = best[:, None] + rates  # by start and stop
        starts.append([int(start) for start in np.argmax(sums, axis=0)])
        best = np.max(sums, axis=0)
        borders = [count]
        for earlier in reversed(starts):
            borders.append(earlier[borders[-1]])
        cuts = borders[::-1]
        division = tuple(
            network.ordered(worker for block in blocks[a:b] for worker in block)
            for a, b in zip(cuts, cuts[1:], strict=False)
        )
        found[number] = (float(best[-1]), division)
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
