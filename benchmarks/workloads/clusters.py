"""Simulated clusters of the convergence study: equal and unequal machines, and speeds that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nfdt.simulate.cluster import ClusterDescription, parse_cluster

STEP_MS, JITTER = 100.0, 0.2
SLOWDOWN, SLOW_SHARE = 3.0, 0.1
FIRST_LOSS, LAST_LOSS, AWAY = 0.1, 0.8, 0.35  # shares of the expected training time

Entries = list[dict[str, Any]]


def machines(workers: int, speeds: str, expected_s: float = 0.0) -> ClusterDescription:
    """Describe a cluster.

    Args:
        workers: Number of workers.
        speeds: Name in :data:`SPEEDS`.
        expected_s: Virtual seconds of a training in which every worker is always busy.
    """
    step = {"step_ms": STEP_MS, "jitter": JITTER}
    return parse_cluster({"workers": [{**step, **entry} for entry in SPEEDS[speeds](workers, expected_s)]})


def expected_seconds(gradients: int, workers: int) -> float:
    """Return the virtual seconds in which equal workers that never wait compute this many gradients."""
    return gradients * STEP_MS / 1000 / workers


def _equal(workers: int, expected_s: float) -> Entries:
    return [{"count": workers}]


def _unequal(workers: int, expected_s: float) -> Entries:
    """Return a half of the machines as they are, a quarter twice and a quarter five times as slow."""
    counts = {1: workers // 2, 2: workers // 4}
    counts[5] = workers - sum(counts.values())
    return [{"count": count, "step_ms": STEP_MS * times} for times, count in counts.items() if count]


def _slowed(workers: int, expected_s: float) -> Entries:
    """Return machines of which each in turn runs at a third of its speed for a tenth of the expected time."""
    starts = [expected_s * (1 - SLOW_SHARE) * i / max(1, workers - 1) for i in range(workers)]
    ends = [start + expected_s * SLOW_SHARE for start in starts]
    return [
        {"drift": [{"at_s": start, "slowdown": SLOWDOWN}, {"at_s": end, "slowdown": 1.0}]}
        for start, end in zip(starts, ends, strict=True)
    ]


def _changing(workers: int, expected_s: float) -> Entries:
    """Return machines of which a half is lost one after the other, at least two; each comes back.

    A machine is away for a third of the expected time, so that most of the time about a quarter of them are.
    """
    leaving = max(2, workers // 2)
    spacing = (LAST_LOSS - FIRST_LOSS) / leaving
    losses = [expected_s * (FIRST_LOSS + spacing * i) for i in range(min(leaving, workers))]
    lost = [{"fails_at_s": at_s, "returns_after_s": expected_s * AWAY} for at_s in losses]
    return [*lost, *([{"count": workers - len(lost)}] if workers > len(lost) else [])]


SPEEDS: dict[str, Callable[[int, float], Entries]] = {
    "equal": _equal,
    "unequal": _unequal,
    "slowed": _slowed,
    "changing": _changing,
}
