"""Splits of the rows of a dataset, taken by workers that run its graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowSplit:
    """Rows ``[begin, end)`` of the order of a pass, which belong to one worker."""

    begin: int
    end: int


@dataclass
class _Last:
    """The last request of a worker, and the answer to it."""

    request: tuple[int, int]
    split: RowSplit | None


class RowSplits:
    """The rows of one iteration after the other; each row of a pass is given to one worker, once.

    A pass is one reading of the rows; a dataset with ``repeat`` has several in an iteration, and workers may be in
    different ones. The rows of a lost worker are not given again.

    Args:
        rows: Rows of a pass.
        size: Rows of a split; the last one of a pass may have fewer.

    Attributes:
        iteration: Number of the current iteration.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.iteration = 0
        self._rows, self._size = rows, size
        self._next: dict[int, int] = {}
        self._last: dict[str, _Last] = {}

    def begin(self, iteration: int) -> None:
        """Begin an iteration; requests of earlier ones get nothing more."""
        self.iteration = iteration
        self._next.clear()
        self._last.clear()

    def forget(self, worker: str) -> None:
        """Forget the last request of a lost worker."""
        self._last.pop(worker, None)

    def take(self, worker: str, iteration: int, pass_index: int, number: int) -> RowSplit | None:
        """Give the worker rows of a pass; None: all rows of the pass are taken, or the iteration is over.

        ``number`` counts the worker's requests of a pass: one that is repeated gets the same answer.
        """
        if iteration != self.iteration:
            return None
        last, request = self._last.get(worker), (pass_index, number)
        if last is not None and last.request == request:
            return last.split
        begin = self._next.get(pass_index, 0)
        split = RowSplit(begin, min(begin + self._size, self._rows)) if begin < self._rows else None
        self._next[pass_index] = split.end if split else self._rows
        self._last[worker] = _Last(request, split)
        return split
