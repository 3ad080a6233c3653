"""What comes to a shard and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.codecs import Codec

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Gradient:
    """One push.

    Attributes:
        sequence: Rises with every push of a worker; an old one is a duplicate.
        values: Mean gradient of the batch, shape ``(size,)``, float32; borrowed until the push returns.
        samples: Samples behind it, its weight where gradients are merged.
        round: Synchronous round, counted from 1 within the job; 0 for an asynchronous push.
        part: Which part of the round.
        parts: Of the round.
        rate: What the learning rate is multiplied by for this gradient alone; not for parts of a round or of a merge,
            which are weighted by their samples.
        computed_on: Sequence of the request of this worker whose answer held the weights the gradient was computed on;
            0 for the newest.
    """

    sequence: int
    values: Vector
    samples: int = 1
    round: int = 0
    part: int = 0
    parts: int = 1
    rate: float = 1.0
    computed_on: int = 0


@dataclass(frozen=True)
class Wish:
    """A worker that holds the weights of answer ``base`` would rather be sent a difference to them, in ``codec``."""

    codec: Codec
    base: int


@dataclass(frozen=True)
class Difference:
    """What to add to the weights of answer ``base``: bytes in a codec, shape ``(n,)`` uint8."""

    codec: Codec
    payload: npt.NDArray[np.uint8]
    base: int


@dataclass(frozen=True)
class Reply:
    """The shard's answer.

    Attributes:
        version: Of the shard.
        weights: A read-only view; None where none were asked for, or a difference stands in for them.
        staleness: Updates the gradient missed.
        applied: False for a duplicate, and for a gradient that was dropped.
        difference: In place of ``weights``.
    """

    version: int
    weights: Vector | None = None
    staleness: int = 0
    applied: bool = True
    difference: Difference | None = None
