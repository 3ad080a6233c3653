"""What delay cost in test accuracy: the figures of docs/convergence.md, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nfdt.core.specs.algorithm import AlgorithmSpec

BARRIER, SOFTSYNC, GROUPS = "barrier", "softsync", "groups"  # rows that merge gradients; the others by update rule


@dataclass(frozen=True)
class Training:
    """One task trained for one length with several rows, each figure the mean of its seeds in %.

    Attributes:
        task: Data, model and length.
        one_machine: Its accuracy.
        rows: Accuracies at its learning rate by number of workers, which are equal but for groups; None: diverged.
        lower: Of rows that diverge: (how many times lower a rate, accuracy) by number of workers.
    """

    task: str
    one_machine: float
    rows: Mapping[str, Mapping[int, float | None]]
    lower: Mapping[str, Mapping[int, tuple[int, float]]] = field(default_factory=dict)


MEASURED = (
    Training(
        "Fashion-MNIST, an MLP, 1,407 updates",
        87.4,
        {
            "ddc": {4: 87.0, 8: 86.4, 16: 85.4, 32: 84.0},
            "staleness-scaled": {4: 83.2, 8: 79.2, 16: 72.3, 32: 46.1},
            **{rule: {4: None, 8: None} for rule in ("plain", "dc", "dc-a", "dc-k")},
            BARRIER: {4: 86.1, 8: 84.8, 16: 82.5, 32: 79.0},
            SOFTSYNC: {8: 79.6},
            GROUPS: {8: 85.9},
        },
        {
            "plain": {4: (5, 84.1), 8: (25, 80.8), 16: (25, 77.4), 32: (25, 62.6)},
            "dc": {4: (5, 84.3), 8: (25, 80.8), 16: (25, 77.7), 32: (25, 66.2)},
            "dc-a": {4: (5, 84.1), 8: (25, 81.0), 16: (25, 78.0), 32: (25, 70.9)},
            "dc-k": {4: (5, 84.0), 8: (25, 80.9), 16: (25, 77.1), 32: (25, 67.2)},
        },
    ),
    Training("the same, 7,035 updates", 88.91, {"ddc": {8: 88.59, 32: 87.76}}),
    Training(
        "CIFAR-10, a CNN, 1,173 updates",
        69.9,
        {"ddc": {8: 62.2, 32: 47.8}, "staleness-scaled": {8: 32.6}, BARRIER: {8: 53.5}},
    ),
)


@dataclass(frozen=True)
class Loss:
    """Points of test accuracy below one machine after the same samples; all None: not measured.

    Attributes:
        low: Least of the trainings.
        high: Greatest of them; None: more than ``low``, which was measured with less delay.
        rate: 1 at one machine's learning rate; n: the row diverges there, and was measured at an n-th of it; None: it
            diverges there, and was measured at no lower one.
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


def expected_loss(row: str, delay: float) -> Loss:
    """What a row lost with this much delay, interpolated between the numbers of workers that were measured.

    Args:
        row: As :func:`measured_as` says.
        delay: Other gradients under way while one is computed: M - 1 with M workers; the mean staleness of rows that
            merge none.
    """
    trainings = [t for t in MEASURED if row in t.rows]
    diverged = [w - 1 for t in trainings for w, accuracy in t.rows[row].items() if accuracy is None]
    if diverged and delay >= min(diverged):
        return _at_a_lower_rate(row, delay)
    curves = [[(0.0, 0.0), *_losses(training, row)] for training in trainings]
    within = [_interpolated(curve, delay) for curve in curves if delay <= curve[-1][0]]
    if within:
        return Loss(min(within), max(within))
    least = max((curve[-1][1] for curve in curves), default=0.0)
    return Loss(least) if least else Loss()


def measured_as(algorithm: AlgorithmSpec) -> str:
    """Under which name a row's accuracies are in the table."""
    if algorithm.topology_facts.grouped:
        return GROUPS if algorithm.rule_facts.modelled else ""
    consistency = algorithm.consistency_facts
    merging = BARRIER if consistency.synchronous else SOFTSYNC if consistency.merges else ""
    return merging or algorithm.update_rule


def _at_a_lower_rate(row: str, delay: float) -> Loss:
    found = [
        (workers, rate, training.one_machine - accuracy)
        for training in MEASURED
        for workers, (rate, accuracy) in training.lower.get(row, {}).items()
        if workers - 1 >= delay
    ]
    if not found:
        return Loss(rate=None)
    _, rate, points = min(found)
    return Loss(points, points, rate)


def _losses(training: Training, row: str) -> list[tuple[float, float]]:
    """(delay, points) by delay, of what did not diverge."""
    known = sorted((w, accuracy) for w, accuracy in training.rows[row].items() if accuracy is not None)
    return [(float(workers - 1), training.one_machine - accuracy) for workers, accuracy in known]


def _interpolated(curve: list[tuple[float, float]], delay: float) -> float:
    for (left, low), (right, high) in zip(curve, curve[1:], strict=False):
        if delay <= right:
            return low + (high - low) * (delay - left) / (right - left)
    return curve[-1][1]
