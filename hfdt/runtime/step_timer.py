"""Durations of steps, averaged over blocks that are long compared with the noise of a busy machine."""

from __future__ import annotations

import json
from collections import deque

RECENT = 19  # latest blocks that are reported, for an estimate of speed
BLOCK_S = 0.06


class StepTimer:
    """Mean seconds per step of consecutive steps with equal numbers of rows, at least :data:`BLOCK_S` per block.

    A step that takes longer forms a separate block.

    Attributes:
        blocks: Number of completed blocks.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._rows = self._steps = 0
        self._seconds = 0.0

    def note(self, rows: int, seconds: float) -> None:
        """Add the duration of a step with this number of rows."""
        if rows != self._rows:
            self._rows, self._steps, self._seconds = rows, 0, 0.0  # a block that is too short is dropped
        self._steps += 1
        self._seconds += seconds
        if self._seconds >= BLOCK_S:
            self._recent.append((rows, self._seconds / self._steps))
            self.blocks += 1
            self._steps, self._seconds = 0, 0.0

    def to_json(self) -> str:
        """Return the number of blocks, and the latest ones as (rows, seconds of a step), as JSON."""
        return json.dumps([self.blocks, [(rows, round(seconds, 7)) for rows, seconds in self._recent]])
