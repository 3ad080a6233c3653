"""Preparation of the next item in a thread while the current one is used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Ready = TypeVar("Ready")


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
