"""What steps took, in blocks long enough to be told from the noise of a busy machine."""

from __future__ import annotations

import json
from collections import deque

RECENT = 19  # latest blocks that are told: what an estimate of speed looks at
BLOCK_S = 0.06


class StepTimer:
    """Mean seconds per step of consecutive steps of the same number of rows, :data:`BLOCK_S` or more in a block.

    A step that takes longer is a block of its own.

    Attributes:
        blocks: How many there were in all.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._rows = self._steps = 0
        self._seconds = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows != self._rows:
            self._rows, self._steps, self._seconds = rows, 0, 0.0  # too short a block says nothing
        self._steps += 1
        self._seconds += seconds
        if self._seconds >= BLOCK_S:
            self._recent.append((rows, self._seconds / self._steps))
            self.blocks += 1
            self._steps, self._seconds = 0, 0.0

    def to_json(self) -> str:
        """How many blocks there were, and the latest ones: (rows, seconds of a step)."""
        return json.dumps([self.blocks, [(rows, round(seconds, 7)) for rows, seconds in self._recent]])
