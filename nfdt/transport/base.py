"""How a worker reaches the parameters, whatever lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import ShapeMismatch, UsageError

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pulled:
    """Weights of the whole model, shape ``(P,)`` float32, and each shard's version.

    The weights may be read-only, and a view of memory that the client's next request overwrites: whoever needs them
    longer copies them.
    """

    weights: Vector
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Pushed:
    """The answer to a push.

    Attributes:
        weights: What to compute the next gradient on, as in :class:`Pulled`; None when not asked for.
        versions: Of each shard after the push.
        staleness: Updates the gradient missed, on the shard where it missed most.
        applied: False when a shard had seen the push before, or dropped it because it was not finite.
    """

    weights: Vector | None
    versions: tuple[int, ...]
    staleness: int
    applied: bool


class ParameterClient(Protocol):
    """One worker's way to all shards. Not thread-safe: one worker, one client, one call at a time."""

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all shards so far."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes received from all shards so far."""
        ...

    def pull(self, min_version: int = 0) -> Pulled:
        """The weights as they are, at least at ``min_version`` on every shard."""
        ...

    def push(
        self,
        gradient: Vector,
        *,
        samples: int,
        round: int = 0,
        part: int = 0,
        parts: int = 1,
        want_weights: bool = True,
    ) -> Pushed:
        """Apply a mean gradient over ``samples`` samples at most once; see :class:`Pushed`."""
        ...

    def close(self) -> None:
        """Disconnect; can be called twice."""
        ...


def shard_bounds(layout: ParameterLayout, shards: int) -> list[slice]:
    """Where each shard's elements lie in the flat vector.

    Raises:
        UsageError: the model cannot be cut into that many shards.
    """
    cuts = layout.cut(shards)
    if len(cuts) != shards:
        raise UsageError(f"Shards: expected at most {len(cuts)} for {len(layout.slots)} variables. Received: {shards}.")
    return [slice(*layout.bounds(cut)) for cut in cuts]


def check_gradient(gradient: Vector, bounds: Sequence[slice]) -> None:
    """Raise ShapeMismatch unless ``gradient`` is a float32 vector of the model's size."""
    size = bounds[-1].stop
    if gradient.shape != (size,) or gradient.dtype != np.float32:
        raise ShapeMismatch(f"Gradient: expected shape ({size},) float32. Received: {gradient.shape} {gradient.dtype}.")


def joined(parts: Sequence[Vector | None]) -> Vector | None:
    """The shards' weights as one vector; None when they were not asked for."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        return None
    return present[0] if len(present) == 1 else np.concatenate(present)
