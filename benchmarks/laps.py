"""Training timed epoch by epoch, with the test accuracy after each; the time of testing is not counted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.epochs import now

Lap = tuple[float, float]  # seconds of training, accuracy after it


@dataclass(frozen=True)
class Goal:
    """When a training may end: at the target, but not before ``least_epochs``; at ``most_epochs``; out of time.

    ``limit_s`` is for the epochs after the first; there is at least one of them.
    """

    target: float
    least_epochs: int
    most_epochs: int
    limit_s: float


@dataclass
class LapClock:
    """Call :meth:`begin` and :meth:`end` around each epoch.

    Args:
        goal: When to end.
        test: Returns the accuracy now.
    """

    goal: Goal
    test: Callable[[], float]
    laps: list[Lap] = field(default_factory=list)
    _began: float = 0.0

    def begin(self) -> None:
        """An epoch begins."""
        self._began = now()

    def end(self) -> bool:
        """An epoch has ended; True when the training may end, too."""
        seconds = now() - self._began
        self.laps.append((seconds, self.test()))
        done, goal = len(self.laps), self.goal
        reached = self.laps[-1][1] >= goal.target and done >= goal.least_epochs
        return reached or done >= goal.most_epochs or sum(lap for lap, _ in self.laps[1:]) > goal.limit_s


def epoch_seconds(laps: Sequence[Lap]) -> list[float]:
    """Seconds of each epoch; the first one, in which workers trace their steps, counts as the others' median."""
    later = [seconds for seconds, _ in laps[1:]]
    return [statistics.median(later), *later]


def throughput(laps: Sequence[Lap], samples: int) -> float:
    """Samples per second of the median epoch after the first; ``samples``: of one epoch."""
    return samples / statistics.median(seconds for seconds, _ in laps[1:])


def seconds_to(target: float, laps: Sequence[Lap]) -> float | None:
    """When the accuracy crossed the target, on a straight line between two epochs' ends; None: never."""
    elapsed, before = 0.0, 0.0
    for seconds, (_, accuracy) in zip(epoch_seconds(laps), laps, strict=True):
        if accuracy >= target:
            return elapsed + seconds * (target - before) / (accuracy - before)
        elapsed, before = elapsed + seconds, accuracy
    return None
