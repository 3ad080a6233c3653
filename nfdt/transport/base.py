"""The interface between a worker and the parameters, and the unanswered pushes of a client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Required, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from nfdt.codecs import Codec
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.arrays.table_rows import Rows
from nfdt.core.errors import ShapeMismatch, UsageError

Vector = npt.NDArray[np.float32]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Pulled:
    """Weights of the whole model, shape ``(P,)`` float32, and each shard's version.

    The weights may be read-only, and a view of memory that the client reuses: with a client made for ``overlap`` they
    stay unchanged during its next ``overlap`` requests, and the following request may overwrite them. Copy them to
    keep them longer.

    Attributes:
        weights: Weights of the whole model. A client made for tables returns
            :class:`~nfdt.core.arrays.table_rows.RowWeights` if it received changed rows; never if exact weights were
            requested.
        versions: Version of each shard.
        sequence: Number of this reply; ``computed_on`` of a push refers to it.
    """

    weights: Vector
    versions: tuple[int, ...]
    sequence: int = 0


@dataclass(frozen=True)
class WeightDelta:
    """Vector to be added to the weights of reply ``base``: bytes in a codec, shape ``(n,)`` uint8."""

    codec: Codec
    payload: npt.NDArray[np.uint8]
    base: int


@dataclass(frozen=True)
class Pushed:
    """Reply to a push.

    Attributes:
        weights: Weights to compute the next gradient on, as in :class:`Pulled`; None if not requested.
        versions: Version of each shard after the push.
        staleness: Number of updates that the gradient missed, the maximum over the shards.
        applied: False if a shard had received the push before, or dropped it because it was not finite.
        sequence: Number of this reply; see :class:`Pulled`.
        seconds: Time from the request to the arrival of the reply, which may be taken later; 0: not measured.
    """

    weights: Vector | None
    versions: tuple[int, ...]
    staleness: int
    applied: bool
    sequence: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, weights: Vector | None, answers: Sequence[Any], sequence: int, seconds: float = 0.0) -> Pushed:
        """Return the union of the shards' answers, each with its version, staleness and whether it was applied."""
        versions, applied = tuple(answer.version for answer in answers), all(answer.applied for answer in answers)
        return cls(weights, versions, max(answer.staleness for answer in answers), applied, sequence, seconds)


class PushOptions(TypedDict, total=False):
    """Options of a push.

    Attributes:
        samples: Number of samples of the gradient.
        round: Synchronous round, counted from 1; 0, the default, for an asynchronous push.
        part: Number of the part in its round.
        parts: Number of parts of the round; default 1.
        tasks: Numbers of the leased tasks whose samples the gradient has; a push for tasks that a shard has applied is
            answered and not applied.
        tickets: Tickets of these tasks, one after the other.
        rate: Learning-rate factor for this gradient; a shard that merges gradients ignores it.
        denominator: Denominator of the gradient's loss, if it is not the number of samples; infinity: of a sum.
            Gradients that are merged are weighted by it, or added.
        want_weights: Whether the reply contains weights; default True.
        computed_on: ``sequence`` of the reply whose weights the gradient was computed on; by default the newest
            reply with weights that was taken.
        compute_s: Time that the gradient took, in seconds, for clients that choose codecs by it.
    """

    samples: Required[int]
    round: int
    part: int
    parts: int
    tasks: Sequence[int]
    tickets: bytes
    rate: float
    denominator: float
    want_weights: bool
    computed_on: int
    compute_s: float


class PendingPush(Protocol):
    """Push that may not have been answered yet."""

    @property
    def sequence(self) -> int:
        """Its sequence number, and that of its reply."""

    @property
    def arrived(self) -> bool:
        """Whether every shard has answered, so that :meth:`result` does not wait."""

    def result(self) -> Pushed:
        """Wait for this reply and those to earlier pushes, and return this one; every call returns the same."""


class PendingRows(Protocol):
    """Rows of tables that may not have arrived yet."""

    def result(self) -> tuple[Rows, ...]:
        """Wait for the rows, and for the replies to earlier pushes; every call returns the same."""


class ParameterClient(Protocol):
    """Connection of one worker to all shards. Not thread-safe: one worker, one client, one call at a time.

    A client is made for an ``overlap``, the number of pushes that may be unanswered while another one is sent.
    """

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent to all shards."""

    @property
    def bytes_received(self) -> int:
        """Number of bytes received from all shards."""

    @property
    def codecs(self) -> Mapping[str, Any]:
        """Report of the codecs in use, ready for JSON; empty if nothing is encoded.

        ``push`` and ``reply``: ``{codec: {"messages", "bytes"}}``; ``residual``: error not sent yet, relative to the
        last push; ``decisions``: decisions of an adaptive job, the oldest first.
        """

    def pull(self, min_version: int = 0, *, exact: bool = True, kept: bool = False) -> Pulled:
        """Return the current weights, at ``min_version`` or later on every shard.

        Args:
            min_version: Number of updates that every shard must have applied.
            exact: Return exact weights; False: weights as close as the job's codec allows, to compute a gradient on.
            kept: Return the weights that the shards keep from the end of an epoch, exactly; no gradient may be
                computed on them.

        Raises:
            UsageError: a push has not been answered yet.
        """

    def begin_push(self, gradient: Vector | Pieces, **options: Unpack[PushOptions]) -> PendingPush:
        """Send a gradient, to be applied at most once; :meth:`PendingPush.result` waits for the reply.

        Args:
            gradient: Shape ``(P,)``, float32, or :class:`nfdt.core.arrays.safetensors_io.Pieces` of it; borrowed until
                the reply arrives. A client made for tables also accepts a
                :class:`nfdt.core.arrays.table_rows.RowVector`.
            **options: See :class:`PushOptions`.

        Raises:
            ShapeMismatch: the gradient has another size or type.
            UsageError: more than ``overlap`` pushes have not been answered yet.
        """

    def push(self, gradient: Vector, **options: Unpack[PushOptions]) -> Pushed:
        """Call :meth:`begin_push` and return its result; see :class:`Pushed`."""

    def close(self) -> None:
        """Disconnect; can be called twice."""


class InFlightRequest(Generic[Answer]):
    """Implementation of :class:`PendingPush` and of :class:`PendingRows`.

    Attributes:
        sequence: Sequence number of the request.
        is_push: Whether it is a push.
        outcome: Reply, or the error in its place; None before.
    """

    def __init__(self, sequence: int, is_push: bool, requests: InFlight) -> None:
        self.sequence, self.is_push = sequence, is_push
        self.outcome: Answer | Exception | None = None
        self._requests = requests

    @property
    def arrived(self) -> bool:
        """Whether every shard has answered."""
        return self.outcome is not None or self._requests.arrived(self)

    def result(self) -> Answer:
        """Wait for this reply and those to earlier requests, and return this one."""
        while self.outcome is None:
            self._requests.wait_for_oldest()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class InFlight:
    """Matching of pushes and lookups with their replies, and a limit on the number of unanswered pushes.

    Args:
        overlap: Number of pushes that may be unanswered while another one is sent.
        take: Waits for the reply to the request with a sequence number.
        arrived: Returns whether the replies to the given number of oldest requests have arrived.
    """

    def __init__(self, overlap: int, take: Callable[[int], Any], arrived: Callable[[int], bool]) -> None:
        self._overlap = overlap
        self._take = take
        self._arrived = arrived
        self._waiting: deque[InFlightRequest[Any]] = deque()

    @property
    def _pushes(self) -> int:
        return sum(request.is_push for request in self._waiting)

    def check_push(self) -> None:
        """Raise UsageError if no push may be sent now."""
        if self._pushes > self._overlap:
            raise UsageError(
                f"Push: expected at most {self._overlap} unanswered ones before it, the overlap this client is made "
                f"for. Received: {self._pushes}. Take the result of the oldest first."
            )

    def check_pull(self) -> None:
        """Raise UsageError if weights cannot be pulled now; wait for the rows of lookups that nobody has waited for."""
        if self._pushes:
            raise UsageError(f"Pull: expected no unanswered push. Received: {self._pushes}. Take their results.")
        while self._waiting:
            self.wait_for_oldest()

    def add(self, sequence: int, *, is_push: bool = True) -> InFlightRequest[Any]:
        """Add a request that has been sent."""
        pending: InFlightRequest[Any] = InFlightRequest(sequence, is_push, self)
        self._waiting.append(pending)
        return pending

    def arrived(self, pending: InFlightRequest[Any]) -> bool:
        """Return whether the reply to this request, and those to earlier ones, have arrived."""
        return self._arrived(self._waiting.index(pending) + 1)

    def wait_for_oldest(self) -> None:
        """Wait for the reply to the oldest request."""
        oldest = self._waiting.popleft()
        try:
            oldest.outcome = self._take(oldest.sequence)
        except Exception as error:  # raised by the result
            oldest.outcome = error


def shard_bounds(layout: ParameterLayout, shards: int) -> list[slice]:
    """Return the range of each shard's elements in the flat vector.

    Raises:
        UsageError: the model cannot be divided into that many shards.
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
