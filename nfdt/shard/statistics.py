"""Counts of a shard; their size depends only on the number of workers, never on the number of pushes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

EXACT_STALENESS = 64
LATENCY_BOUNDS_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def staleness_bin(staleness: int) -> int:
    """Return the histogram bin: exact below ``EXACT_STALENESS``, then the next lower power of two."""
    return staleness if staleness < EXACT_STALENESS else 1 << (staleness.bit_length() - 1)


@dataclass
class PushCounts:
    """Counts of one worker's pushes."""

    pushes: int = 0
    duplicates: int = 0
    dropped: int = 0
    staleness: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; bins as text, ascending."""
        bins = {str(key): self.staleness[key] for key in sorted(self.staleness)}
        return {"pushes": self.pushes, "duplicates": self.duplicates, "dropped": self.dropped, "staleness": bins}


@dataclass
class ShardStatistics:
    """Counts per worker; a worker that left keeps its counts."""

    workers: dict[str, PushCounts] = field(default_factory=dict)
    busy_s: float = 0.0
    wait_s: float = 0.0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))

    def took(self, wait_s: float, busy_s: float) -> None:
        """Add the time that a push waited for other pushes, and the time that it kept the shard busy."""
        self.wait_s += wait_s
        self.busy_s += busy_s
        self.latencies[bisect_left(LATENCY_BOUNDS_S, wait_s + busy_s)] += 1

    def count(self, worker: str, staleness: int, applied: bool) -> None:
        """Count a push; an unapplied push was not finite."""
        found = self.workers.setdefault(worker, PushCounts())
        found.pushes += 1
        found.dropped += not applied
        bin_ = staleness_bin(staleness)
        found.staleness[bin_] = found.staleness.get(bin_, 0) + 1

    def count_duplicate(self, worker: str) -> None:
        """Count a repeated push."""
        self.workers.setdefault(worker, PushCounts()).duplicates += 1

    def to_json(self) -> dict[str, Any]:
        """Return totals, and under ``workers`` the same counts per worker."""
        counts = {name: found.to_json() for name, found in self.workers.items()}
        totals = {key: sum(c[key] for c in counts.values()) for key in ("pushes", "duplicates", "dropped")}
        times = {"busy_s": self.busy_s, "wait_s": self.wait_s, "latency_s": self._latency()}
        return {**totals, **times, "workers": counts}

    def _latency(self) -> dict[str, Any]:
        """Return the histogram of the pushes' times: ``counts`` has one bin more, above the last bound."""
        return {"bounds_s": LATENCY_BOUNDS_S, "counts": self.latencies, "sum_s": self.busy_s + self.wait_s}
