"""Requests to a shard and its replies, whose weights may be a delta to those of an earlier reply.

A worker's backup equals the weights that the worker holds, bit for bit, after the losses of a codec. The next delta is
relative to the backup, so it also carries earlier losses: the backup is the error feedback of the replies. The update
rule measures the drift from the backup, so losses are part of the delay that the rule compensates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.codecs import Codec
from nfdt.transport.base import WeightDelta

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
        tasks: Numbers of the leased tasks whose samples it has; empty: unknown, ``sequence`` alone identifies the push.
        rate: Learning-rate factor for this gradient alone; not used for parts of a round or of a merge, which are
            weighted.
        computed_on: Sequence of this worker's request whose reply held the weights that the gradient was computed on;
            0 for the newest.
        denominator: Denominator of the gradient's loss, if it is not the number of samples (0); infinity: of a sum.
        length: Euclidean norm of ``values``, if it is known.
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
    length: float | None = None

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
class Reply:
    """Reply of the shard.

    Attributes:
        version: Version of the shard.
        weights: A read-only view; None if none were requested, or if a delta replaces them.
        staleness: Number of updates that the gradient missed.
        applied: False for a duplicate, and for a gradient that was dropped.
        delta: A delta instead of ``weights``.
        parts: Yields the ranges of ``weights``, in order, as they are complete; raises NfdtError if the update fails.
            None: all are.
    """

    version: int
    weights: Vector | None = None
    staleness: int = 0
    applied: bool = True
    delta: WeightDelta | None = None
    parts: Callable[[], Iterator[slice]] | None = None


RESYNC_AFTER = 1000
"""Number of deltas in a row after which all weights are sent once."""


class ReplyHistory:
    """Replies on one stream. The worker receives them in order, so the base of the next delta is the last reply.

    A new stream begins with all weights. Replies on an old stream do not count: the last of them may be lost.
    """

    def __init__(self) -> None:
        self._last = 0
        self._deltas = 0

    def delta_request(self, codec: Codec | None) -> DeltaRequest | None:
        """Return the request for a delta in ``codec`` as the next reply; None for all weights."""
        if codec is None or not self._last or self._deltas >= RESYNC_AFTER:
            return None
        return DeltaRequest(codec, self._last)

    def add(self, sequence: int, reply: Reply) -> None:
        """Record the reply to the request ``sequence``."""
        if reply.delta is not None:
            self._last, self._deltas = sequence, self._deltas + 1
        elif reply.weights is not None:
            self._last, self._deltas = sequence, 0
