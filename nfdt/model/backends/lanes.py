"""Several gradients computed in one call, on a backend that can; each of them is a lane of the call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from nfdt.core.arrays.layout import Array, RowSelection


@dataclass(frozen=True)
class LaneBatch:
    """Batch of one lane.

    Attributes:
        signature: Equal for batches that can be in one call.
        content: Pytree of arrays, or the numbers of rows of the arrays that are on the device, shape ``(n,)`` int32.
        from_device: Whether the content are numbers of rows.
    """

    signature: Hashable
    content: Any
    from_device: bool


class LaneResult(NamedTuple):
    """Result of one lane: arrays on the host, views of those of all lanes.

    Attributes:
        gradient: Gradient of the loss, shape ``(P,)`` float32.
        state: Untrained variables after the step.
        counted: What the step has added to each metric variable.
        denominator: Denominator of the loss, as of a ``GradientResult``.
    """

    gradient: Array
    state: list[Array]
    counted: list[Array]
    denominator: Any = None


@dataclass(eq=False)
class GradientLane:
    """Gradients that one worker computes one after the other, and whose inputs are known in advance.

    Attributes:
        weights: Flat weights, shape ``(P,)`` float32; unchanged until all gradients are computed.
        version: Number of updates applied so far.
        state: Untrained variables before the next gradient.
        batches: Batches whose gradients are not computed yet.
        shares: Fraction of the samples of a union of batches in each of them.
        results: Results so far.
    """

    weights: Array
    version: int
    state: list[Array]
    batches: list[LaneBatch]
    shares: list[float]
    results: list[LaneResult] = field(default_factory=list)

    def add_result(self, result: LaneResult) -> None:
        """Add the result of the next batch, whose state the batch after it starts with."""
        self.state = result.state
        self.results.append(result)
        del self.batches[0], self.shares[0]


class BatchedStep(Protocol):
    """Step of a model that computes several lanes in one call."""

    def hold(self, pytree: Any) -> bool:
        """Put the arrays of the training data on the device; return whether they are there."""
        ...

    def rows(self, rows: RowSelection) -> LaneBatch:
        """Return the batch of these rows of the arrays on the device."""
        ...

    def batch(self, pytree: Any) -> LaneBatch | None:
        """Return a batch of arrays on the host; None if a lane cannot have it."""
        ...

    def __call__(self, lanes: Sequence[GradientLane]) -> list[LaneResult]:
        """Compute the next gradient of each lane; all have the same signature. The lanes stay as they are."""
        ...

    def count(self, counted: Sequence[Array]) -> dict[str, Any]:
        """Add what a lane has counted to the model's metrics; return the running logs, name -> 0-d tensor."""
        ...
