"""A task, one local batch that the coordinator assigns and a worker trains, and sets of task numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Task:
    """One local batch: rows ``[start, stop)`` of the sample order of pass ``pass_index``.

    ``task`` is unique within the job. ``round``, ``part`` and ``parts`` identify the part of a
    synchronous global batch; rounds count from 1 (``parts == 1`` and ``round == 0`` for asynchronous presets).
    ``round_samples`` is the number of samples of all parts; 0 where it is not known before the batches are read.
    ``data`` is the encoded batch itself for streams, which have no row numbers.
    ``ticket`` shows the shards that the task is leased to the worker; see :mod:`nfdt.core.wire.job_token`.
    """

    task: int
    start: int
    stop: int
    pass_index: int = 0
    round: int = 0
    part: int = 0
    parts: int = 1
    data: bytes = b""
    samples: int = 0
    round_samples: int = 0
    ticket: bytes = field(default=b"", compare=False)

    def share_of(self, samples: int) -> float:
        """Return the share of ``samples`` in the round's samples; all parts count alike if their number is unknown."""
        return samples / self.round_samples if self.round_samples else 1.0 / max(self.parts, 1)


class TaskNumbers:
    """Set of integers, stored as sorted, disjoint ranges; adjacent ranges are merged.

    Tasks have consecutive numbers, so those of an epoch are a few ranges.

    Args:
        ranges: (begin, end) of each range, sorted and disjoint.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = [(int(begin), int(end)) for begin, end in ranges]
        self._begins = [begin for begin, _ in pairs]
        self._ends = [end for _, end in pairs]

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        at = bisect_right(self._begins, number)
        return at > 0 and number < self._ends[at - 1]

    def add(self, number: int) -> None:
        """Add a number; does nothing if the set has it."""
        if number in self:
            return
        at = bisect_right(self._begins, number)
        follows = at > 0 and self._ends[at - 1] == number
        precedes = at < len(self._begins) and self._begins[at] == number + 1
        if follows and precedes:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif follows:
            self._ends[at - 1] = number + 1
        elif precedes:
            self._begins[at] = number
        else:
            self._begins.insert(at, number)
            self._ends.insert(at, number + 1)

    def to_array(self) -> npt.NDArray[np.int64]:
        """Return the ranges, shape ``(ranges, 2)``."""
        return np.array([self._begins, self._ends], np.int64).T
