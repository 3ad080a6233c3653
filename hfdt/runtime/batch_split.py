"""Split of a global batch over ranks, as pure functions, the preparation of batches, and the weights of gradients.

The weight of a rank's gradient follows from its part of the batch, or from the denominators of the loss on all ranks;
see :mod:`nfdt.model.backends.denominator`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from nfdt.model.backends.denominator import SUM

if TYPE_CHECKING:
    from hfdt.runtime.communicator import Communicator

Item = TypeVar("Item")
Ready = TypeVar("Ready")


def split_rows(start: int, stop: int, size: int, rank: int) -> tuple[int, int]:
    """Return the part ``[start, stop)`` of a global batch that a rank computes: parts differ by at most one row.

    If a batch has fewer rows than there are ranks, the parts of the last ranks are empty.
    """
    rows = stop - start
    share, rest = divmod(rows, size)
    begin = start + rank * share + min(rank, rest)
    return begin, begin + share + (rank < rest)


def split_by_shares(start: int, stop: int, shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the part ``[start, stop)`` of a batch that a rank computes, in proportion to ``shares``.

    With a batch of ``sum(shares)`` rows, every rank gets exactly its share.
    """
    rows, whole = stop - start, sum(shares)
    begin = start + rows * sum(shares[:rank]) // whole
    return begin, start + rows * sum(shares[: rank + 1]) // whole


def cut_rows(ranges: Sequence[tuple[int, int, int]], most: int) -> list[tuple[int, int, int]]:
    """Split ranges of rows into steps of about equal size, each with at most ``most`` rows.

    Args:
        ranges: ``(pass, start, stop)``, in order; adjacent ranges of one pass are joined.
        most: Number of rows of the largest step.

    Returns:
        ``(pass, start, stop)`` of each step; every row once, in order.
    """
    joined: list[tuple[int, int, int]] = []
    for number, start, stop in ranges:
        if joined and joined[-1][0] == number and joined[-1][2] == start:
            joined[-1] = (number, joined[-1][1], stop)
        else:
            joined.append((number, start, stop))
    cuts = []
    for number, start, stop in joined:
        rows = stop - start
        count = -(-rows // most)
        borders = [start + rows * i // count for i in range(count + 1)]
        cuts += [(number, a, b) for a, b in zip(borders, borders[1:], strict=False)]
    return cuts


def weight_of(rows: int, total: int) -> float:
    """Return the weight of a mean over ``rows`` in the mean over ``total``."""
    return rows / total if total else 0.0


def prepared_ahead(prepare: Callable[[Item], Ready], items: Sequence[Item]) -> Generator[Ready]:
    """Yield ``prepare(item)`` of each item, in order; the following one is prepared while the caller uses the result.

    A rank gathers its next batch in this way while it waits for the other ranks in a reduction. At most one call of
    ``prepare`` runs at a time. Closing the iterator waits for the one that runs, and drops its result.

    Args:
        prepare: Prepares an item; the first one in the thread of the caller, the others in one other thread.
        items: The items.

    Raises:
        Exception: any exception of ``prepare``, when the result of its item is due.
    """
    if not items:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="prepared") as pool:
        result = prepare(items[0])
        for item in items[1:]:
            following = pool.submit(prepare, item)
            yield result
            result = following.result()
        yield result


NAME = "hfdt_denominator"
SAMPLES, SUMS, COUNTED = b"samples", b"sums", b"counted"


class SharedDenominator:
    """Agreement of all ranks on how gradients are combined: by samples, as sums, or by what each rank has counted.

    Only the last needs another reduction, of one number. A rank without rows computes no loss, but takes part in it;
    therefore all ranks agree once, in the first step of a job.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._agreed: bytes | None = None
        # A separate graph: only there has the operation the same name on ranks with and without rows.
        self._sum: Any = tf.function(lambda own: ranks.sum(own, NAME), input_signature=[tf.TensorSpec([], tf.float32)])

    @property
    def is_known(self) -> bool:
        """Whether the ranks have agreed."""
        return self._agreed is not None

    def forget(self) -> None:
        """Agree again in the next step, as other ranks may have joined."""
        self._agreed = None

    def agree(self, own: Any, *, has_rows: bool) -> None:
        """Agree on the kind of the denominator, given this rank's; collective. A second call does nothing."""
        if self._agreed is None:
            kind = SAMPLES if own is None else SUMS if own is SUM else COUNTED
            kinds = self._ranks.gather(kind if has_rows else b"")
            self._agreed = next((kind for kind in kinds if kind), None)

    def share(self, own: Any, share: Any) -> Any:
        """Return the weight of this rank's gradient in the mean of all; collective if denominators are counted.

        Args:
            own: Denominator of this rank, 0-d float32; None: that of its samples.
            share: Fraction of all samples in this rank's part, 0-d float32; 0 for a rank without rows.
        """
        return share if self._agreed != COUNTED else self._counted(own, share)[0]

    def union(self, own: Any, share: float) -> tuple[Any, float]:
        """Return the weight of this rank's gradient in that of all, and the denominator of that; see :meth:`share`.

        The denominator is 0 for the number of samples, and infinity for a sum, as in a push.
        """
        if self._agreed == SUMS:
            return 1.0, SUM
        if self._agreed != COUNTED:
            return share, 0.0
        weight, total = self._counted(own, tf.constant(share, tf.float32))
        return weight, float(total)

    def _counted(self, own: Any, share: Any) -> tuple[Any, Any]:
        own = share if own is None else tf.cast(own, tf.float32)
        total = self._sum(own)
        return own / total, total
