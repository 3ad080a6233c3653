"""Simulated clusters of the convergence study: equal and unequal machines, speeds that change, and links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nfdt.simulate.cluster import ClusterDescription, parse_cluster

STEP_MS, JITTER = 100.0, 0.2
LATENCY_MS = 0.2
SLOWDOWN, SLOW_SHARE = 3.0, 0.1
FIRST_LOSS, LAST_LOSS, AWAY = 0.1, 0.8, 0.35  # shares of the expected training time

Entries = list[dict[str, Any]]


def speeds_and_link(name: str) -> tuple[str, float | None]:
    """Return the name of the speeds, and the megabits per second of all links; None: links cost nothing.

    Args:
        name: Name in :data:`SPEEDS`; with a link it is followed by its rate, as in ``unequal@100``.

    Raises:
        ValueError: there are no such speeds, or the rate is no positive number.
    """
    speeds, _, rate = name.partition("@")
    mbit = float(rate) if rate.isdecimal() else 0.0
    if speeds not in SPEEDS or ("@" in name and mbit <= 0):
        known = ", ".join(SPEEDS)
        raise ValueError(f"Speeds: expected one of {known}, or one with a rate as in unequal@100. Received: {name}.")
    return speeds, mbit or None


def machines(workers: int, speeds: str, expected_s: float = 0.0) -> ClusterDescription:
    """Describe a cluster.

    Args:
        workers: Number of workers.
        speeds: Name of the speeds, and of the link of every worker and of the shard; see :func:`speeds_and_link`.
        expected_s: Virtual seconds of a training in which every worker is always busy.
    """
    name, mbit = speeds_and_link(speeds)
    step = {"step_ms": STEP_MS, "jitter": JITTER}
    link = {"bandwidth_mbit": mbit, "latency_ms": LATENCY_MS} if mbit else {}
    entries = [{**step, **link, **entry} for entry in SPEEDS[name](workers, expected_s)]
    return parse_cluster({"workers": entries, "shards": {"bandwidth_mbit": mbit}})


def expected_seconds(gradients: int, workers: int) -> float:
    """Return the virtual seconds in which equal workers that never wait compute this many gradients."""
    return gradients * STEP_MS / 1000 / workers


def _equal(workers: int, expected_s: float) -> Entries:
    return [{"count": workers}]


def _equal_200ms(workers: int, expected_s: float) -> Entries:
    return [{"count": workers, "step_ms": 200.0}]


def _unequal(workers: int, expected_s: float) -> Entries:
    """Return a half of the machines as they are, a quarter twice and a quarter five times as slow."""
    counts = {1: workers // 2, 2: workers // 4}
    counts[5] = workers - sum(counts.values())
    return [{"count": count, "step_ms": STEP_MS * times} for times, count in counts.items() if count]


def _halves(workers: int, expected_s: float) -> Entries:
    """Return a half of the machines as they are, and the others four times as slow."""
    counts = {1: workers - workers // 2, 4: workers // 2}
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
    "equal-200ms": _equal_200ms,
    "unequal": _unequal,
    "halves": _halves,
    "slowed": _slowed,
    "changing": _changing,
}
