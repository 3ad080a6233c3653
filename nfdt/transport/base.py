"""How a worker reaches the parameters, whatever lies between them."""

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
    they stay as they are during its next ``overlap`` requests, and the one after these may overwrite them. Whoever
    needs them longer copies them.

    Attributes:
        weights: Of the whole model. A client made for tables gives
            :class:`~nfdt.core.arrays.table_rows.RowWeights` where it was sent changed rows; never when asked for exact
            weights.
        versions: Of each shard.
        sequence: Names this answer among those of the client; what ``computed_on`` of a push says.
    """

    weights: Vector
    versions: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True)
class Pushed:
    """The answer to a push.

    Attributes:
        weights: What to compute the next gradient on, as in :class:`Pulled`; None when not asked for.
        versions: Of each shard after the push.
        staleness: Updates the gradient missed, on the shard where it missed most.
        applied: False when a shard had seen the push before, or dropped it because it was not finite.
        sequence: Names this answer; see :class:`Pulled`.
    """

    weights: Vector | None
    versions: tuple[int, ...]
    staleness: int
    applied: bool
    sequence: int = 0


class PushOptions(TypedDict, total=False):
    """What goes with a gradient.

    Attributes:
        samples: Samples behind the mean.
        round: Synchronous round, from 1 on; 0, unless given, for an asynchronous push.
        part: Which part of the round.
        parts: Of the round; 1 unless given.
        rate: Multiplies the learning rate for this gradient; a shard ignores it where it merges gradients.
        want_weights: Whether to answer with weights; True unless given.
        computed_on: ``sequence`` of the answer whose weights the gradient was computed on; unless given, of the newest
            answer with weights that was taken.
        compute_s: How long the gradient took, in seconds, for clients that choose codecs by it.
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
    """A push on its way."""

    @property
    def arrived(self) -> bool:
        """Whether every shard has answered, so that :meth:`result` does not wait."""
        ...

    def result(self) -> Pushed:
        """The answer; waits for it, and for those to earlier pushes. The same whenever it is called."""
        ...


class ParameterClient(Protocol):
    """One worker's way to all shards. Not thread-safe: one worker, one client, one call at a time.

    A client is made for an ``overlap``: so many pushes may be unanswered while another one is sent.
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
        """What was encoded how, ready for JSON; empty where gradients and weights travel as they are.

        ``push`` and ``reply``: ``{codec: {"messages", "bytes"}}``; ``residual``: what pushes still owe, relative to the
        last one; ``decisions``: of an adaptive job, the oldest first.
        """
        ...

    def pull(self, min_version: int = 0, *, exact: bool = True) -> Pulled:
        """The weights as they are, at least at ``min_version`` on every shard.

        Args:
            min_version: Updates that every shard must have applied.
            exact: To the last bit; else as near as the job's codec brings them, for computing a gradient on.

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
        """:meth:`begin_push` and its result; see :class:`Pushed`."""
        ...

    def close(self) -> None:
        """Disconnect; can be called twice."""
        ...


def shard_bounds(layout: ParameterLayout, shards: int) -> list[slice]:
    """Where each shard's elements lie in the flat vector.

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
    """The shards' weights as one vector; None when they were not asked for."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        return None
    return present[0] if len(present) == 1 else np.concatenate(present)
