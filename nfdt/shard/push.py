"""What comes to a shard and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Gradient:
    """One push.

    Attributes:
        sequence: Rises with every push of a worker; an old one is a duplicate.
        values: Mean gradient of the batch, shape ``(size,)``, float32; borrowed until the push returns.
        samples: Samples behind it, its weight where gradients are merged.
        round: Synchronous round, counted from 0 within the job.
        part: Which part of the round.
        parts: Of the round; 1 for an asynchronous push.
    """

    sequence: int
    values: Vector
    samples: int = 1
    round: int = 0
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Reply:
    """The shard's answer; ``weights`` is a read-only view (None: not asked for)."""

    version: int
    weights: Vector | None = None
    staleness: int = 0
    applied: bool = True
