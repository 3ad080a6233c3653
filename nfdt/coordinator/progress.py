"""Running logs of an epoch over all workers, and the limit of their report rate."""

from __future__ import annotations

from collections.abc import Mapping

INTERVAL_S = 0.1
MANY = 256  # workers, from which on events that look at all of them are rarer in proportion


class RunningLogs:
    """The sample-weighted mean of the workers' latest running logs of one epoch."""

    def __init__(self) -> None:
        self._samples: dict[str, int] = {}
        self._logs: dict[str, dict[str, float]] = {}

    def __len__(self) -> int:
        """Return the number of workers with samples."""
        return len(self._samples)

    def add(self, worker: str, samples: int, logs: Mapping[str, float]) -> None:
        """Add ``samples`` computed by the worker; ``logs`` replace its earlier ones unless empty."""
        self._samples[worker] = self._samples.get(worker, 0) + samples
        if logs:
            self._logs[worker] = dict(logs)

    def mean(self) -> dict[str, float]:
        """Return each log's mean over the workers that report it, weighted by their samples."""
        totals: dict[str, float] = {}
        weights: dict[str, int] = {}
        for worker, logs in self._logs.items():
            weight = self._samples[worker]
            for name, value in logs.items() if weight else ():
                totals[name] = totals.get(name, 0.0) + weight * value
                weights[name] = weights.get(name, 0) + weight
        return {name: total / weights[name] for name, total in totals.items()}


class Throttle:
    """Rate limit of one event per interval; with more than :data:`MANY` workers, which it describes, a longer one."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._last: float | None = None

    def is_due(self, now: float, workers: int = 1) -> bool:
        """Return whether the interval is over for an event about so many workers; if so, the next one begins now."""
        if self._last is not None and now - self._last < self._interval_s * max(1.0, workers / MANY):
            return False
        self._last = now
        return True


class StallWatch:
    """Detector of a long time without progress: after ``after_s`` seconds, then at each doubling."""

    def __init__(self, now: float, after_s: float) -> None:
        self._after_s = after_s
        self.useful(now)

    def useful(self, now: float) -> None:
        """Record progress."""
        self._since = now
        self._next_s = self._after_s

    def stalled_s(self, now: float) -> float | None:
        """Return the seconds without progress if a report is due, else None."""
        waited = now - self._since
        if waited < self._next_s:
            return None
        self._next_s = 2 * waited
        return waited
