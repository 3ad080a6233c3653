"""Gradients that are applied together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nfdt.shard.tensors import Vector


@dataclass
class GradientAccumulator:
    """The weighted sum of gradients that are applied together.

    Attributes:
        total: Sum of the gradients times their samples; of a merge, times their own factor of the learning rate too.
        weight: Sum of the weights of a merge, 0-d.
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
