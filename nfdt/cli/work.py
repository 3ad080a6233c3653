"""How much there is to do in an epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a ``fit`` asks for, as far as a prediction needs it.

    Attributes:
        batch_size: Of one worker.
        samples: Of an epoch.
        weights: Elements of the model; 0 where nobody has said.
    """

    batch_size: int
    samples: int
    weights: int
