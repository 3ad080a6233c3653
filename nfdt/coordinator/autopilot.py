"""What an ``auto`` job does next, decided from the measured speeds of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nfdt.core.spec import JobSpec
from nfdt.planning import Choice, Cluster, Row, WorkerCost, choose
from nfdt.schedulers import StepTime

LEAST_STEPS = 10  # of every worker before the first decision


def follows_a_plan(spec: JobSpec) -> bool:
    """Whether the job's row is chosen while it trains."""
    return spec.algorithm.name == "auto"


class Autopilot:
    """Chooses a row once every worker is measured, and another one when that is clearly better.

    Args:
        local_batch: Reference batch of one worker, in samples.
        overlap: The most there may be.

    Attributes:
        row: What the job does now.
        choice: The last decision; None before the first.
    """

    def __init__(self, local_batch: int, overlap: int) -> None:
        self.row = Row("free", "dbs", 0)
        self.choice: Choice | None = None
        self._local_batch, self._overlap = local_batch, overlap
        self._exchange: dict[str, float] = {}

    def look(self, steps: Mapping[str, tuple[StepTime, float]]) -> Choice | None:
        """A decision that is new: the first one, or another row; None where all stays as it is.

        Args:
            steps: Of each worker the seconds of a step with what was not hidden of its exchange, and that part.
        """
        choice = choose(self._cluster(steps), current=self.row if self.choice else None, overlap=self._overlap)
        if self.choice is not None and choice.row == self.row:
            return None
        self.choice, self.row = choice, choice.row
        return choice

    def _cluster(self, steps: Mapping[str, tuple[StepTime, float]]) -> Cluster:
        return Cluster(tuple(self._cost(name, *times) for name, times in steps.items()), self._local_batch)

    def _cost(self, name: str, step: StepTime, exchange_s: float) -> WorkerCost:
        """What an exchange takes is seen only while none is hidden: afterwards it is remembered."""
        if self.row.overlap == 0 or exchange_s > self._exchange.get(name, 0.0):
            self._exchange[name] = exchange_s
        whole = step.seconds(self._local_batch)
        computing = max(0.05, 1 - exchange_s / whole)
        return WorkerCost(name, step.scaled(computing), self._exchange[name])


def told(choice: Choice) -> dict[str, Any]:
    """A decision as the data of an event."""
    row = choice.row
    return {
        "row": {"topology": row.topology, "batch": row.batch, "overlap": row.overlap},
        "samples_per_s": round(choice.prediction.samples_per_s, 3),
        "reason": choice.reason,
    }
