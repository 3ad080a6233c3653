"""Loss of a training that has grown beyond any use, by the losses before."""

from __future__ import annotations

from collections.abc import Iterable

GROWTH = 1e6  # over the least loss before
LEAST = 1.0  # a loss that begins near zero may grow to ordinary size


def has_exploded(loss: float, before: Iterable[float]) -> bool:
    """Whether the mean loss of an epoch exceeds every loss before by so much that the training diverges.

    It exceeds ``GROWTH * max(LEAST, |l|)`` for one of the losses before. Negative losses never do: some, as that of a
    critic, have no lower bound.

    Args:
        loss: Mean of an epoch.
        before: Losses of first batches and of earlier epochs; without any, nothing is known of the loss's scale.
    """
    return any(loss > GROWTH * max(LEAST, abs(each)) for each in before)
