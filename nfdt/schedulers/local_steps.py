"""Local steps: the number of batches that each worker trains by itself between two exchanges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median, median_low

from nfdt.core.specs.algorithm import MOST_LOCAL_STEPS
from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.proportions import proportional_split

FIRST_STEPS = 16  # of local_steps='auto', before a step and a push are measured
EXCHANGE_SHARE = 0.1  # of a worker's time, in which a push may be on its way
ALIKE = 1.02  # quotient of two measured speeds that may be the same
ROUNDING = 1e-9  # rounding error by which a division may fall below a whole number
RECENT = 5  # tasks and pushes whose median counts
EARLY_S = 1.0  # of computation, after which a worker asks whether the next epoch has begun
UNKNOWN_SHARE = 0.25  # of an equal share of an epoch, for a task of unknown duration
LEAST_ROUNDS = 50  # pushes of each worker in a training: with fewer most trainings of docs/convergence.md lose accuracy
LEAST_SHARE = 8  # a task at the end of an epoch has at least this part of a worker's steps


class LocalStepSizes(LocalSizes):
    """Rows of a task of each worker: several batches of the script, by the worker's speed.

    With v_i batches per second, H steps of the fastest worker, and p_i seconds of a push with its reply::

        H_i = max(1, floor(H min(1, 1.02 v_i / max v)))       a number of steps
        H_i = ceil(10 p_i v_i), within 1 and 64               auto

    Args:
        reference: Rows of a batch of the script.
        steps: H; None: auto.
        row_samples: Samples of a row.
    """

    def __init__(self, reference: int, steps: int | None, row_samples: int = 1) -> None:
        super().__init__(reference)
        self._most, self._row_samples = steps, row_samples
        self._steps: dict[str, int] = {}
        self._step_s: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {}  # seconds of a step, of each task
        self._pushes: dict[str, deque[float]] = {}
        self._now, self._ends = 0.0, dict[str, float]()  # when workers have trained what they hold

    @property
    def steps(self) -> Mapping[str, int]:
        """Steps of each worker between two exchanges."""
        return dict(self._steps)

    @property
    def round_steps(self) -> int:
        """Mean steps of a worker in a round that begins now."""
        if self._most is not None:
            return self._most
        return round(sum(self._steps.values()) / len(self._steps)) if self._steps else FIRST_STEPS

    def rounds(self, rows: int) -> float | None:
        """Return the number of pushes of each worker in so many rows; None before all speeds are known."""
        return rows / self.reference / sum(self._steps.values()) if self._steps and self._is_known else None

    def of(self, worker: str) -> int:
        """Return the rows of the worker's next task."""
        return self.reference * self._steps.get(worker, self._most or FIRST_STEPS)

    def next(self, worker: str, left: int) -> int:
        """Return the rows of the worker's next task: at the end of an epoch so many that all workers end together.

        With r_i batches that worker i holds and has not trained yet, and R that nobody holds, the epoch is over after
        T = (R + sum r) / sum v seconds, and worker i trains T v_i - r_i more batches, rounded. If that is less than the
        smallest task, it gets the smallest one; or none, if a worker that is busy will be sooner done with one.
        What is rounded off needs a push of its own, so where that takes longer than a step it is rounded up.
        While a speed is unknown, a task is at most a quarter of an equal share of the rest: its worker may be slow.
        """
        steps, rest = self._steps.get(worker), left / self.reference
        if steps is None or not self._is_known:
            share = UNKNOWN_SHARE * rest / len(self._steps) if len(self._steps) > 1 else rest
            return min(self.of(worker), self.reference * max(1, math.ceil(share)))
        busy_s = {n: max(0.0, self._ends.get(n, 0.0) - self._now) for n in self._step_s}
        held = sum(seconds / self._step_s[name] for name, seconds in busy_s.items())
        left_s = (rest + held) / sum(1 / each for each in self._step_s.values())
        step_s, push_s = self._step_s[worker], self._push_s(worker)
        fair = (left_s - busy_s[worker]) / step_s
        if fair >= self._least(worker):
            return self.reference * min(steps, math.ceil(fair - (ROUNDING if push_s > step_s else 0.5)))
        done_s = busy_s[worker] + min(self._least(worker), rest) * step_s + push_s
        sooner = (
            busy + max(min(self._least(name), rest) * self._step_s[name], self._push_s(name)) + self._push_s(name)
            for name, busy in busy_s.items()
            if busy and name != worker
        )
        return 0 if any(other < done_s for other in sooner) else self.reference * self._least(worker)

    def early_rows(self, worker: str) -> int:
        """Return the rows of the next epoch that a worker computes in about :data:`EARLY_S`.

        0: it only waits for the end of the epoch, as its speed is unknown, or a push takes no longer than a step.
        """
        step_s = self._step_s.get(worker)
        if step_s is None or self._push_s(worker) <= step_s:
            return 0
        return self.reference * max(1, round(EARLY_S / step_s))

    def _push_s(self, worker: str) -> float:
        """Return the seconds of a worker's push with its reply; 0: unknown."""
        return median(pushes) if (pushes := self._pushes.get(worker)) else 0.0

    def _least(self, worker: str) -> int:
        """Return the batches of a worker's smallest task."""
        return -(-self._steps[worker] // LEAST_SHARE)

    def look(self, now: float) -> None:
        """Set the time of the calls of :meth:`next` that follow, in seconds."""
        self._now = now

    def leased(self, worker: str, rows: int, begins: float) -> None:
        """Record that a worker trains so many rows from a time on."""
        if worker in self._step_s:
            self._ends[worker] = begins + rows / self.reference * self._step_s[worker]

    def joined(self, worker: str) -> None:
        """Add a worker."""
        self._steps.setdefault(worker, self._most or FIRST_STEPS)

    def left(self, worker: str) -> None:
        """Remove a worker; unknown workers are no error."""
        for held in (self._steps, self._step_s, self._recent, self._pushes, self._ends):
            held.pop(worker, None)

    def trained(self, worker: str, samples: int, compute_s: float, push_s: float) -> None:
        """Record a task. One is enough to know a speed: a slow worker would need the whole training for several."""
        if push_s > 0:
            self._pushes.setdefault(worker, deque(maxlen=RECENT)).append(push_s)
        if worker not in self._steps or compute_s <= 0:
            return
        batches = -(-samples // (self.reference * self._row_samples))
        recent = self._recent.setdefault(worker, deque(maxlen=RECENT))
        recent.append(compute_s / batches)
        self._step_s[worker] = median_low(recent)  # of two the shorter: the first one has compiled
        if self._most is None:
            self._steps[worker] = self._apart(worker)
        else:
            fastest = min(self._step_s.values())
            for name, own in self._step_s.items():
                self._steps[name] = max(1, math.floor(self._most * min(1.0, ALIKE * fastest / own) + ROUNDING))

    def _apart(self, worker: str) -> int:
        """Return the steps with which a push takes a tenth of the time between two of them."""
        if not (push_s := self._push_s(worker)):
            return self._steps[worker]
        wanted = push_s / EXCHANGE_SHARE / self._step_s[worker]
        return min(max(1, math.ceil(wanted - ROUNDING)), MOST_LOCAL_STEPS)

    def split(self, total: int) -> list[tuple[str, int]]:
        """Divide a round of ``total`` rows by speed into whole batches: (worker, rows), without workers without any."""
        speeds = [1 / self._step_s[worker] if self._is_known else 1.0 for worker in self._steps]
        whole, rest = divmod(total, self.reference)
        shares = proportional_split(whole + bool(rest), speeds)
        parts = [(worker, count * self.reference) for worker, count in zip(self._steps, shares, strict=True) if count]
        if rest:  # the last batch of a pass is short
            worker, rows = parts[-1]
            parts[-1] = worker, rows - self.reference + rest
        return parts

    @property
    def _is_known(self) -> bool:
        return len(self._step_s) == len(self._steps)
