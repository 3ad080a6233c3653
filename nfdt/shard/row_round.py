"""Table rows of a synchronous round: parts are summed in their own order, independent of the order of arrival."""

from __future__ import annotations

import numpy as np

from nfdt.core.arrays.table_rows import Rows, RowVector
from nfdt.shard.messages import Gradient


class RowRound:
    """Received parts of the newest round; the dense store checks and counts them."""

    def __init__(self) -> None:
        self._number = -1
        self._parts: dict[int, tuple[tuple[Rows, ...], float]] = {}
        self._added = False

    def take(self, gradient: Gradient, vector: RowVector) -> None:
        """Keep a copy of a part; the first one of a new round replaces the old round."""
        if gradient.round != self._number:
            self._number, self._parts = gradient.round, {}
        rows = tuple(Rows(own.index.copy(), own.values.copy()) for own in vector.rows)
        self._parts[gradient.part] = (rows, gradient.weight)
        self._added = gradient.added

    def union(self) -> list[Rows]:
        """Return, for each table, the gradient of all parts: their mean by denominators, or the sum for sums."""
        parts = [self._parts[part] for part in sorted(self._parts)]
        denominator = 1.0 if self._added else sum(weight for _, weight in parts)
        found = []
        for own in zip(*(rows for rows, _ in parts), strict=True):
            index = np.concatenate([rows.index for rows in own])
            weighted = [rows.values * np.float32(weight) for rows, (_, weight) in zip(own, parts, strict=True)]
            total = Rows.summed(index, np.concatenate(weighted))
            found.append(Rows(total.index, total.values / np.float32(denominator)))
        return found
