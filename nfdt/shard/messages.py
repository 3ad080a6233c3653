"""Requests to a shard and its replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.codecs import Codec

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Gradient:
    """One push.

    Attributes:
        sequence: Number that increases with every push of a worker; an old one is a duplicate.
        values: Mean gradient of the batch, shape ``(size,)``, float32; borrowed until the push returns.
        samples: Number of samples of the gradient.
        round: Synchronous round, counted from 1 within the job; 0 for an asynchronous push.
        part: Number of the part in its round.
        parts: Number of parts of the round.
        tasks: Numbers of the leased tasks whose samples it has; empty: unknown, it is told apart by ``sequence`` alone.
        rate: Learning-rate factor for this gradient alone; not used for parts of a round or of a merge, which are
            weighted.
        computed_on: Sequence of this worker's request whose reply held the weights that the gradient was computed on;
            0 for the newest.
        denominator: Denominator of the gradient's loss, if it is not the number of samples (0); infinity: of a sum.
    """

    sequence: int
    values: Vector
    samples: int = 1
    round: int = 0
    part: int = 0
    parts: int = 1
    rate: float = 1.0
    computed_on: int = 0
    tasks: Sequence[int] = ()
    denominator: float = 0.0

    @property
    def added(self) -> bool:
        """Whether it is the gradient of a sum, and is added to others; otherwise the mean is taken."""
        return math.isinf(self.denominator)

    @property
    def weight(self) -> float:
        """Weight of the gradient among others."""
        return 1.0 if self.added else self.denominator or float(self.samples)


@dataclass(frozen=True)
class DeltaRequest:
    """Request for a delta to the weights of reply ``base``, which the worker holds, encoded in ``codec``."""

    codec: Codec
    base: int


@dataclass(frozen=True)
class WeightDelta:
    """Vector to be added to the weights of reply ``base``: bytes in a codec, shape ``(n,)`` uint8."""

    codec: Codec
    payload: npt.NDArray[np.uint8]
    base: int


@dataclass(frozen=True)
class Reply:
    """Reply of the shard.

    Attributes:
        version: Version of the shard.
        weights: A read-only view; None if none were requested, or if a delta replaces them.
        staleness: Number of updates that the gradient missed.
        applied: False for a duplicate, and for a gradient that was dropped.
        delta: A delta instead of ``weights``.
    """

    version: int
    weights: Vector | None = None
    staleness: int = 0
    applied: bool = True
    delta: WeightDelta | None = None
