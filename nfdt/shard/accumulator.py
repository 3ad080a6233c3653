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
        total: Sum of the gradients times their samples; in a merge also times their own learning-rate factor.
        weight: Sum of the weights in a merge, 0-d.
        samples: Number of samples of all gradients.
        count: Number of gradients.
        longest: Length of the longest gradient.
    """

    total: Vector
    weight: Any
    samples: float = 0.0
    count: int = 0
    longest: float = 0.0

    def note(self, samples: int, length: float) -> None:
        """Count a gradient that was added to the sum."""
        self.samples += samples
        self.count += 1
        self.longest = max(self.longest, length)
