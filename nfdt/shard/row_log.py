"""What updates did to a table's rows: enough to say which have changed since a version, and what they were then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.table_rows import Vector

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Change:
    """The update that made ``version``: rising numbers of rows, and their values before it."""

    version: int
    index: Index
    before: Vector


class RowLog:
    """The newest changes of one table.

    It stands in for a copy of the table per worker and version: what a worker held is what there is now, with the
    changes since then undone.

    Args:
        rows: Of the table.
        version: Nothing before it is known.
    """

    def __init__(self, rows: int, version: int = 0) -> None:
        self._place = np.full(rows, -1, np.int32)  # scratch: where a row lies in what is asked for
        self.clear(version)

    def clear(self, version: int) -> None:
        """The table became another one with ``version``."""
        self._changes: deque[_Change] = deque()
        self._known_since = version
        self._kept = 0

    def add(self, version: int, index: Index, before: Vector) -> None:
        """The update that made ``version`` changed these rows, each named once."""
        self._changes.append(_Change(version, index, before))
        self._kept += index.size

    def keep(self, since: int, most: int) -> None:
        """Forget what was before version ``since``, and the oldest changes as long as there are over ``most`` rows."""
        while self._changes and (self._changes[0].version <= since or self._kept > most):
            oldest = self._changes.popleft()
            self._kept -= oldest.index.size
            self._known_since = oldest.version

    def changed_since(self, version: int) -> Index | None:
        """The rows that have changed since ``version``, rising; None where that is not known any more."""
        if version < self._known_since:
            return None
        found = [change.index for change in self._changes if change.version > version]
        if not found:
            return np.zeros(0, np.int32)
        return found[0] if len(found) == 1 else np.unique(np.concatenate(found))

    def undone(self, version: int, index: Index, values: Vector) -> Vector:
        """``values``, those of the rows ``index`` now, as they were at ``version``; a new array.

        Of a version that is not known any more, those of the oldest that is.
        """
        values = values.copy()
        self._place[index] = np.arange(index.size, dtype=np.int32)
        for change in reversed(self._changes):
            if change.version <= version:
                break
            place = self._place[change.index]
            there = place >= 0
            values[place[there]] = change.before[there]
        self._place[index] = -1
        return values
