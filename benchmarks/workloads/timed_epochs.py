"""Training timed epoch by epoch, with the test accuracy after each; a test counts to the epoch after it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.workloads.epochs import now

TimedEpoch = tuple[float, float]  # seconds of training, accuracy after it


@dataclass(frozen=True)
class Goal:
    """End of a training: at the target, but not before ``least_epochs``; at ``most_epochs``; or at the time limit.

    ``limit_s`` limits the epochs after the first; there is at least one of them.
    """

    target: float
    least_epochs: int
    most_epochs: int
    limit_s: float


@dataclass
class EpochTimer:
    """Timer of epochs, from end to end: call :meth:`begin` before the first one, and :meth:`end` after each.

    Workers may train the next epoch while an accuracy is computed: only whole rounds of both are comparable.

    Args:
        goal: Condition for the end of the training.
        test: Function that returns the current accuracy.
    """

    goal: Goal
    test: Callable[[], float]
    epochs: list[TimedEpoch] = field(default_factory=list)
    _began: float = 0.0

    def begin(self) -> None:
        """Record the start of the first epoch; later calls do nothing."""
        self._began = self._began or now()

    def end(self) -> bool:
        """Add an epoch and test; return whether the training may end."""
        ended = now()
        seconds, self._began = ended - self._began, ended
        self.epochs.append((seconds, self.test()))
        done, goal = len(self.epochs), self.goal
        reached = self.epochs[-1][1] >= goal.target and done >= goal.least_epochs
        return reached or done >= goal.most_epochs or sum(epoch for epoch, _ in self.epochs[1:]) > goal.limit_s


def epoch_seconds(epochs: Sequence[TimedEpoch]) -> list[float]:
    """Return the seconds of each epoch; the first one, which traces steps, is set to the median of the others."""
    later = [seconds for seconds, _ in epochs[1:]]
    return [statistics.median(later), *later]


def throughput(epochs: Sequence[TimedEpoch], samples: int) -> float:
    """Return the samples per second of the median epoch after the first; ``samples``: samples of one epoch."""
    return samples / statistics.median(seconds for seconds, _ in epochs[1:])


def seconds_to(target: float, epochs: Sequence[TimedEpoch]) -> float | None:
    """Return the seconds until the accuracy reached the target, interpolated between epoch ends; None if never."""
    elapsed, before = 0.0, 0.0
    for seconds, (_, accuracy) in zip(epoch_seconds(epochs), epochs, strict=True):
        if accuracy >= target:
            return elapsed + seconds * (target - before) / (accuracy - before)
        elapsed, before = elapsed + seconds, accuracy
    return None
