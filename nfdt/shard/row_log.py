"""Log of the updates of a table: the rows that changed since a version, and their values at that version."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.table_rows import Vector

Index = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Change:
    """Update that made ``version``: ascending row numbers, and the values of these rows before it."""

    version: int
    index: Index
    before: Vector


class RowLog:
    """Newest changes of one table.

    The log replaces a copy of the table per worker and version: the backup of a worker is the table with the changes
    since its version undone.

    Args:
        rows: Number of rows of the table.
        version: Oldest known version.
    """

    def __init__(self, rows: int, version: int = 0) -> None:
        self._place = np.full(rows, -1, np.int32)  # scratch: position of a row in the request
        self.clear(version)

    def clear(self, version: int) -> None:
        """Drop all changes: the table was replaced with ``version``."""
        self._changes: deque[_Change] = deque()
        self._known_since = version
        self._kept = 0

    def add(self, version: int, index: Index, before: Vector) -> None:
        """Add the update that made ``version``: unique rows, and their values before it."""
        self._changes.append(_Change(version, index, before))
        self._kept += index.size

    def keep(self, since: int, most: int) -> None:
        """Drop changes before version ``since``, and the oldest ones while more than ``most`` rows are kept."""
        while self._changes and (self._changes[0].version <= since or self._kept > most):
            oldest = self._changes.popleft()
            self._kept -= oldest.index.size
            self._known_since = oldest.version

    def changed_since(self, version: int) -> Index | None:
        """Return the rows that changed since ``version``, ascending; None if that is no longer known."""
        if version < self._known_since:
            return None
        found = [change.index for change in self._changes if change.version > version]
        if not found:
            return np.zeros(0, np.int32)
        return found[0] if len(found) == 1 else np.unique(np.concatenate(found))

    def undone(self, version: int, index: Index, values: Vector) -> Vector:
        """Return the values of the rows ``index`` at ``version``, given their current ``values``; a new array.

        For a version that is no longer known, return the values of the oldest known version.
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
