"""The speed of each worker: seconds per step as a line t(b) = alpha + beta * b, fitted to its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, quantiles

WARM_UP = 3  # the first steps trace and compile; they are dropped
WINDOW = 16
LEAST = 3  # steps before the first estimate
VARIED = 1.08  # ratio of batch sizes that separates alpha from beta
CHANGE = 1.15  # a change of speed: CHANGE_RUN consecutive steps off by this ratio to the same side
CHANGE_RUN = 5
STUMBLE = 2.0

Pair = tuple[int, float]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of b samples, ``alpha_s + beta_s * b``, with ``alpha_s >= 0`` and ``beta_s > 0``."""

    alpha_s: float
    beta_s: float

    def seconds(self, samples: float) -> float:
        """Return the seconds of one step of ``samples`` samples."""
        return self.alpha_s + self.beta_s * samples

    def samples_per_s(self, samples: float) -> float:
        """Return the throughput with steps of ``samples`` samples."""
        return samples / self.seconds(samples)

    def scaled(self, factor: float) -> StepTime:
        """Return the same line, ``factor`` times slower."""
        return StepTime(self.alpha_s * factor, self.beta_s * factor)


class Throughput:
    """One worker's step time, fitted to its measured steps; communication counts if the worker waited for it.

    The last 16 steps count; the first three never count. The line is the Theil-Sen estimate (median of slopes), so that
    up to a quarter of the steps may be outliers. If the batch size has not varied, alpha is unknown: the last known
    shape is scaled to the steps (at first alpha = 0: time proportional to samples). Five consecutive steps that are
    more than 15 % off to one side are a change of speed: earlier steps are discarded.

    Attributes:
        steps: Number of recorded steps, including dropped ones.
        identified: Whether alpha has been separated from beta.
        changes: Number of detected changes of speed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.identified = False
        self._window: deque[Pair] = deque(maxlen=WINDOW)
        self._shape = StepTime(0.0, 1.0)
        self._fit: StepTime | None = None
        self._run = 0  # consecutive steps that were too slow (> 0) or too fast (< 0)
        self.changes = 0
        self._exchange: deque[float] = deque(maxlen=WINDOW)
        self._last = 1.0  # seconds of the last step over its expected seconds

    def add(self, samples: int, seconds: float, exchange_s: float = 0.0) -> None:
        """Record a step of ``samples`` samples that took ``seconds``, of which ``exchange_s`` were not computation."""
        self.steps += 1
        if self.steps <= WARM_UP or samples < 1:
            return
        seconds = max(seconds, 1e-9)
        self._notice_change(samples, seconds)
        self._window.append((samples, seconds))
        self._exchange.append(exchange_s)
        if self._run and abs(self._run) >= CHANGE_RUN:
            self._window = deque(list(self._window)[-CHANGE_RUN:], maxlen=WINDOW)
            self._run, self._last = 0, 1.0
            self.changes += 1
        self._fit = None

    @property
    def step_time(self) -> StepTime | None:
        """The fitted line; None before three steps have counted."""
        if self._fit is None and len(self._window) >= LEAST:
            self._fit = self._fitted()
        return self._fit

    @property
    def exchange_s(self) -> float:
        """Median of the seconds of a step that are not computation; 0 before the first measurement."""
        return median(self._exchange) if self._exchange else 0.0

    @property
    def now(self) -> StepTime | None:
        """The line, scaled to the last step if that took over twice or under half of it: the speed may have changed."""
        line = self.step_time
        return line.scaled(self._last) if line and not 1 / STUMBLE <= self._last <= STUMBLE else line

    def _notice_change(self, samples: int, seconds: float) -> None:
        expected = self.step_time
        if expected is None:
            return
        self._last = ratio = seconds / expected.seconds(samples)
        side = (ratio > CHANGE) - (ratio * CHANGE < 1)
        self._run = self._run + side if side * self._run > 0 else side

    def _fitted(self) -> StepTime:
        line = fit_line(self._window)
        if line is not None:
            self._shape, self.identified = line, True
        return self._shape.scaled(median(t / self._shape.seconds(b) for b, t in self._window))


def fit_line(pairs: Sequence[Pair] | deque[Pair]) -> StepTime | None:
    """Return the Theil-Sen line through (samples, seconds); None if the pairs do not determine it.

    They do not if fewer than three of them lie at each end of the batch sizes, or if the middle half of the slopes is
    wider than the slope itself. A negative alpha becomes 0.
    """
    sizes = sorted(b for b, _ in pairs)
    if len(sizes) < 2 * LEAST or sizes[-LEAST] < VARIED * sizes[LEAST - 1]:
        return None
    apart = sizes[-LEAST] - sizes[LEAST - 1]
    slopes = [(t - s) / (b - a) for (a, s), (b, t) in combinations(pairs, 2) if abs(b - a) >= apart]
    low, beta, high = quantiles(slopes, n=4)
    if beta <= 0 or high - low > beta:
        return None
    return StepTime(max(0.0, median(t - beta * b for b, t in pairs)), beta)


class Speeds:
    """The measured steps of a job's workers."""

    def __init__(self) -> None:
        self._workers: dict[str, Throughput] = {}

    def measured(self, worker: str, samples: int, seconds: float, exchange_s: float = 0.0) -> None:
        """Record a step of the worker: ``samples`` took ``seconds``, of which ``exchange_s`` were not computation."""
        self._workers.setdefault(worker, Throughput()).add(samples, seconds, exchange_s)

    def of(self, worker: str) -> Throughput:
        """Return the worker's steps, to read; there are none before the first one is recorded."""
        return self._workers.get(worker, _UNMEASURED)

    def remove(self, worker: str) -> None:
        """Remove a lost worker."""
        self._workers.pop(worker, None)


_UNMEASURED = Throughput()


def lease_size(remaining: int, workers: int, task_s: float | None, *, target_s: float = 0.2, most: int = 64) -> int:
    """Return the number of tasks to lease at once: guided self-scheduling with a time limit.

    It is at most ``remaining / (2 * workers)``, so that the tail is divided into small leases. It is at most
    ``target_s`` worth of tasks, so that a lost lease costs little and progress is visible. It is 1 until
    ``task_s`` is known.
    """
    if task_s is None:
        return 1
    cap = min(most, max(1, int(target_s / task_s)))
    return min(cap, max(1, remaining // (2 * max(1, workers))))
