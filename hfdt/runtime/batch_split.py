"""Division of global batches between ranks, as pure functions, and preparation of batches ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
