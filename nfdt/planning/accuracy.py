"""Loss of test accuracy by delay: measurements of docs/convergence.md, interpolated between numbers of workers."""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nfdt.core.specs.algorithm import AlgorithmSpec

BARRIER, SOFTSYNC, GROUPS = "barrier", "softsync", "groups"  # merging presets; others: their update rule


@dataclass(frozen=True)
class MeasuredTraining:
    """Accuracies of several presets on one task, each the mean over its seeds in %.

    Attributes:
        task: Data, model and length.
        one_machine: Accuracy of one machine.
        rows: Accuracies at the learning rate of one machine, by preset and number of workers; None: diverged.
        lower: For presets that diverge: (divisor of the learning rate, accuracy) by preset and number of workers.
    """

    task: str
    one_machine: float
    rows: Mapping[str, Mapping[int, float | None]]
    lower: Mapping[str, Mapping[int, tuple[int, float]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeasuredTraining:
        """Read the JSON of ``dataclasses.asdict``: JSON has no integer keys and no tuples."""
        rows = {row: {int(w): figure for w, figure in found.items()} for row, found in data["rows"].items()}
        lower = {row: {int(w): (d, a) for w, (d, a) in found.items()} for row, found in data["lower"].items()}
        return cls(data["task"], data["one_machine"], rows, lower)


@functools.cache
def measured_trainings() -> tuple[MeasuredTraining, ...]:
    """Return the trainings of docs/convergence.md from the data file that ``scripts/bench convergence_page`` writes."""
    file = importlib.resources.files("nfdt.planning") / "data" / "accuracy.json"
    return tuple(map(MeasuredTraining.from_json, json.loads(file.read_text(encoding="utf-8"))))


@dataclass(frozen=True)
class AccuracyLoss:
    """Loss of test accuracy relative to one machine after the same samples, in points; all None: not measured.

    Attributes:
        low: Least loss over the trainings.
        high: Greatest loss; None: more than ``low``, which was measured with a shorter delay.
        rate: 1 at one machine's learning rate; n: the preset diverges there and was measured at 1/n of it; None: it
            diverges there and was not measured at a lower one.
    """

    low: float | None = None
    high: float | None = None
    rate: int | None = 1

    def __str__(self) -> str:
        if self.rate is None:
            return "diverges"
        if self.rate > 1:
            return f"diverges ({self.low:.1f} at lr/{self.rate})"
        if self.low is None:
            return "unknown"
        if self.high is None:
            return f"over {self.low:.1f}"
        low, high = f"{self.low:.1f}", f"{self.high:.1f}"
        return low if low == high else f"{low} to {high}"


def expected_loss(row: str, delay: float) -> AccuracyLoss:
    """Return a preset's loss at a delay, interpolated between the measured numbers of workers.

    Args:
        row: Name from :func:`measured_as`.
        delay: Other gradients in flight while one is computed: M - 1 with M workers; the mean staleness of presets
            that do not merge gradients.
    """
    trainings = [t for t in measured_trainings() if row in t.rows]
    diverged = [w - 1 for t in trainings for w, accuracy in t.rows[row].items() if accuracy is None]
    if diverged and delay >= min(diverged):
        return _at_a_lower_rate(row, delay)
    curves = [[(0.0, 0.0), *_losses(training, row)] for training in trainings]
    within = [_interpolated(curve, delay) for curve in curves if delay <= curve[-1][0]]
    if within:
        return AccuracyLoss(min(within), max(within))
    # No training measured such a delay: the loss at the longest measured one is a lower limit.
    least = max((curve[-1][1] for curve in curves), default=0.0)
    return AccuracyLoss(least) if least else AccuracyLoss()


def measured_as(algorithm: AlgorithmSpec) -> str:
    """Return the name of a preset's accuracies in the data file."""
    if algorithm.exchange_facts.local:
        return ""  # no training with local steps is in the data
    if algorithm.topology_facts.grouped:
        return GROUPS if algorithm.rule_facts.modelled else ""
    consistency = algorithm.consistency_facts
    merging = BARRIER if consistency.synchronous else SOFTSYNC if consistency.merges else ""
    return merging or algorithm.update_rule


def _at_a_lower_rate(row: str, delay: float) -> AccuracyLoss:
    found = [
        (workers, rate, training.one_machine - accuracy)
        for training in measured_trainings()
        for workers, (rate, accuracy) in training.lower.get(row, {}).items()
        if workers - 1 >= delay
    ]
    if not found:
        return AccuracyLoss(rate=None)
    _, rate, points = min(found)
    return AccuracyLoss(points, points, rate)


def _losses(training: MeasuredTraining, row: str) -> list[tuple[float, float]]:
    """Return (delay, points) by delay, without diverged trainings."""
    known = sorted((w, accuracy) for w, accuracy in training.rows[row].items() if accuracy is not None)
    return [(float(workers - 1), training.one_machine - accuracy) for workers, accuracy in known]


def _interpolated(curve: list[tuple[float, float]], delay: float) -> float:
    for (left, low), (right, high) in zip(curve, curve[1:], strict=False):
        if delay <= right:
            return low + (high - low) * (delay - left) / (right - left)
    return curve[-1][1]
