"""Table rows of a synchronous round: parts are summed in their own order, independent of the order of arrival."""

from __future__ import annotations

import numpy as np

from nfdt.core.arrays.table_rows import Rows, RowVector
from nfdt.shard.messages import Gradient


class RowRound:
    """Received parts of the newest round; the dense store checks and counts them."""

    def __init__(self) -> None:
        self._number = -1
        self._parts: dict[int, tuple[tuple[Rows, ...], int]] = {}

    def take(self, gradient: Gradient, vector: RowVector) -> None:
        """Keep a copy of a part; the first one of a new round replaces the old round."""
        if gradient.round != self._number:
            self._number, self._parts = gradient.round, {}
        rows = tuple(Rows(own.index.copy(), own.values.copy()) for own in vector.rows)
        self._parts[gradient.part] = (rows, gradient.samples)

    def mean(self) -> list[Rows]:
        """Return, for each table, the mean over the samples of all parts."""
        parts = [self._parts[part] for part in sorted(self._parts)]
        samples = sum(count for _, count in parts)
        found = []
        for own in zip(*(rows for rows, _ in parts), strict=True):
            index = np.concatenate([rows.index for rows in own])
            weighted = [rows.values * np.float32(count) for rows, (_, count) in zip(own, parts, strict=True)]
            total = Rows.summed(index, np.concatenate(weighted))
            found.append(Rows(total.index, total.values / np.float32(samples)))
        return found
