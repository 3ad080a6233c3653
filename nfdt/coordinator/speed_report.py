"""The speeds of workers as data of events and of the history: at most once a second, and only changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nfdt.coordinator.progress import Throttle
from nfdt.coordinator.speeds import SpeedTracker

REPORT_EVERY_S = 1.0
CHANGED = 0.1  # a speed that changed by a smaller fraction is not reported again


class SpeedReport:
    """Description of workers' speeds, with those that were reported last.

    Args:
        tracker: Measured speeds.
    """

    def __init__(self, tracker: SpeedTracker) -> None:
        self._tracker = tracker
        self._throttle = Throttle(REPORT_EVERY_S)
        self._described: dict[str, dict[str, Any]] = {}
        self._reported: dict[str, dict[str, Any]] = {}

    @property
    def described(self) -> dict[str, dict[str, Any]]:
        """The last description of each worker, including lost ones."""
        return dict(self._described)

    def describe(self, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Describe the speed of each of these workers that is measured."""
        for worker in workers:
            size, speeds = self._tracker.size_of(worker), self._tracker.speeds
            if line := speeds.of(worker):
                self._described[worker] = {
                    "samples_per_s": round(line.samples_per_s(size), 3),
                    "step_s": round(line.seconds(size), 6),
                    "step_exchange_s": round(speeds.exchange_s(worker), 6),
                    "batch_size": size,
                }
        return {worker: self._described[worker] for worker in workers if worker in self._described}

    def is_due(self, now: float) -> bool:
        """Whether the last check is at least a second ago."""
        return self._throttle.is_due(now)

    def look(self, workers: Sequence[str], now: float) -> dict[str, dict[str, Any]] | None:
        """Return the speeds of these workers if one of them has changed since the last report, else None."""
        self._throttle.restart(now)
        described = self.describe(workers)
        if not any(self._has_changed(worker, entry) for worker, entry in described.items()):
            return None
        self._reported = described
        return described

    def _has_changed(self, worker: str, entry: dict[str, Any]) -> bool:
        last = self._reported.get(worker)
        if last is None or last["batch_size"] != entry["batch_size"]:
            return True
        return bool(abs(entry["samples_per_s"] - last["samples_per_s"]) > CHANGED * last["samples_per_s"])
