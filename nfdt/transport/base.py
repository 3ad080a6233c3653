"""The interface between a worker and the parameters, with one implementation per transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Required, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import ShapeMismatch, UsageError

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pulled:
    """Weights of the whole model, shape ``(P,)`` float32, and each shard's version.

    The weights may be read-only, and a view of memory that the client uses again: with a client made for ``overlap``
    they stay as they are during its next ``overlap`` requests, and the one after these may overwrite them. Copy them
    to keep them longer.

    Attributes:
        weights: Weights of the whole model. A client made for tables returns
            :class:`~nfdt.core.arrays.table_rows.RowWeights` if it received changed rows; never when asked for exact
            weights.
        versions: Version of each shard.
        sequence: Number of this answer; ``computed_on`` of a push refers to it.
    """

    weights: Vector
    versions: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True)
class Pushed:
    """The answer to a push.

    Attributes:
        weights: Weights to compute the next gradient on, as in :class:`Pulled`; None when not asked for.
        versions: Version of each shard after the push.
        staleness: Number of updates that the gradient missed, on the shard where it missed most.
        applied: False when a shard had seen the push before, or dropped it because it was not finite.
        sequence: Number of this answer; see :class:`Pulled`.
    """

    weights: Vector | None
    versions: tuple[int, ...]
    staleness: int
    applied: bool
    sequence: int = 0


class PushOptions(TypedDict, total=False):
    """Options of a push.

    Attributes:
        samples: Number of samples behind the mean.
        round: Synchronous round, from 1 on; 0, unless given, for an asynchronous push.
        part: Number of the part in its round.
        parts: Number of parts of the round; 1 unless given.
        rate: Factor of the learning rate for this gradient; a shard ignores it if it merges gradients.
        want_weights: Whether to answer with weights; True unless given.
        computed_on: ``sequence`` of the answer whose weights the gradient was computed on; unless given, of the newest
            answer with weights that was taken.
        compute_s: Time that the gradient took, in seconds, for clients that choose codecs by it.
    """

    samples: Required[int]
    round: int
    part: int
    parts: int
    rate: float
    want_weights: bool
    computed_on: int
    compute_s: float


class PendingPush(Protocol):
    """A push that may not have been answered yet."""

    @property
    def arrived(self) -> bool:
        """Whether every shard has answered, so that :meth:`result` does not wait."""
        ...

    def result(self) -> Pushed:
        """Wait for the answer, and for those to earlier pushes, and return it; every call returns the same."""
        ...


class ParameterClient(Protocol):
    """Connects one worker to all shards. Not thread-safe: one worker, one client, one call at a time.

    A client is made for an ``overlap``, the number of pushes that may be unanswered while another one is sent.
    """

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to all shards so far."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes received from all shards so far."""
        ...

    @property
    def codecs(self) -> Mapping[str, Any]:
        """Report of the codecs in use, ready for JSON; empty if gradients and weights travel as they are.

        ``push`` and ``reply``: ``{codec: {"messages", "bytes"}}``; ``residual``: error left to send, relative to
        the last push; ``decisions``: of an adaptive job, the oldest first.
        """
        ...

    def pull(self, min_version: int = 0, *, exact: bool = True) -> Pulled:
        """Return the weights as they are, at least at ``min_version`` on every shard.

        Args:
            min_version: Number of updates that every shard must have applied.
            exact: Return exact weights; False: as near as the job's codec brings them, to compute a gradient on.

        Raises:
            UsageError: a push has not been answered yet.
        """
        ...

    def begin_push(self, gradient: Vector, **options: Unpack[PushOptions]) -> PendingPush:
        """Send a mean gradient, to be applied at most once; :meth:`PendingPush.result` waits for the answer.

        Args:
            gradient: Shape ``(P,)``, float32; borrowed until the answer is there. A client made for tables takes a
                :class:`nfdt.core.arrays.table_rows.RowVector` as well.
            **options: See :class:`PushOptions`.

        Raises:
            ShapeMismatch: the gradient has another size or type.
            UsageError: more than ``overlap`` pushes have not been answered yet.
        """
        ...

    def push(self, gradient: Vector, **options: Unpack[PushOptions]) -> Pushed:
        """Call :meth:`begin_push` and return its result; see :class:`Pushed`."""
        ...

    def close(self) -> None:
        """Disconnect; can be called twice."""
        ...


def shard_bounds(layout: ParameterLayout, shards: int) -> list[slice]:
    """Return the range of each shard's elements in the flat vector.

    Raises:
        UsageError: the model cannot be cut into that many shards.
    """
    runs = layout.cut(shards)
    if len(runs) != shards:
        raise UsageError(f"Shards: expected at most {len(runs)} for {len(layout.slots)} variables. Received: {shards}.")
    return [run.elements for run in runs]


def check_gradient(gradient: Vector, bounds: Sequence[slice]) -> None:
    """Raise ShapeMismatch unless ``gradient`` is a float32 vector of the model's size."""
    size = bounds[-1].stop
    if gradient.shape != (size,) or gradient.dtype != np.float32:
        raise ShapeMismatch(f"Gradient: expected shape ({size},) float32. Received: {gradient.shape} {gradient.dtype}.")


def joined(parts: Sequence[Vector | None]) -> Vector | None:
    """Join the shards' weights to one vector; None if they were not asked for."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        return None
    return present[0] if len(present) == 1 else np.concatenate(present)
