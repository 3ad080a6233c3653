"""Sum of gradients that are applied together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Vector = Any
"""A float32 vector of the shard's size, an array or a tensor."""


@dataclass
class GradientAccumulator:
    """Weighted sum of gradients that are applied together.

    Attributes:
        total: Sum of the gradients times their denominators; in a merge also times their own learning-rate factor.
        weight: Sum of these weights in a merge, 0-d.
        denominator: Sum of the denominators; of gradients of sums, each 1.
        count: Number of gradients.
        longest: Length of the longest gradient.
        added: Whether the gradients are of sums: their union has their sum as its gradient, not their mean.
    """

    total: Vector
    weight: Any
    denominator: float = 0.0
    count: int = 0
    longest: float = 0.0
    added: bool = False

    def note(self, weight: float, length: float, added: bool) -> None:
        """Count a gradient that was added to the sum."""
        self.denominator += weight
        self.count += 1
        self.longest = max(self.longest, length)
        self.added = added

    @property
    def union(self) -> float:
        """Factor of the mean gradient in the gradient of the union."""
        return float(self.count) if self.added else 1.0
