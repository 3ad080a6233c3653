"""The tasks of an epoch as data: the pass and the rows of each local batch."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.core.work.tasks import Task


@dataclass(frozen=True)
class Position:
    """Position of the job in the endless sequence of passes, and the next free numbers."""

    pass_index: int = 0
    row: int = 0
    task: int = 0
    round: int = 1


@dataclass(frozen=True)
class TaskPlan:
    """The rounds of one epoch, computed on request; a round is one step of the epoch.

    Attributes:
        samples: Rows of the data, n >= 1.
        batch_size: Local batch b0, in rows.
        row_samples: Samples of a row: 1, or the nominal size of a batch where a row is the index of a batch.
        parts: Local batches per round: 1 for asynchronous presets, M for synchronous ones.
        steps: Maximum number of rounds in the epoch. An epoch ends with its pass, as in Keras: the next one begins a
            new pass. None for a whole pass, ``ceil(n / (parts * b0))``.
        begin: Position at which the epoch begins.
        synchronous: Whether rounds are numbered; asynchronous tasks all have round 0.
        round_steps: Steps of a worker in a round, each with an equal part of ``batch_size``.
    """

    samples: int
    batch_size: int
    parts: int = 1
    steps: int | None = None
    begin: Position = Position()
    synchronous: bool = False
    row_samples: int = 1
    round_steps: int = 1

    def __len__(self) -> int:
        """Return the number of rounds in the epoch."""
        rest = self._rounds_from(self.begin.row)
        return rest if self.steps is None else min(self.steps, rest)

    @property
    def step_count(self) -> int:
        """Number of steps in the epoch."""
        if self.round_steps == 1:
            return len(self)
        step_rows = self.round_rows // self.round_steps
        return -(-len(self.rows[1]) // step_rows)

    def round(self, index: int) -> tuple[Task, ...]:
        """Return the tasks of round ``index`` of the epoch, counted from 0."""
        pass_index, start = self._place(index)
        stop = min(start + self.round_rows, self.samples)
        starts = range(start, stop, self.batch_size)
        return tuple(
            Task(
                task=self.begin.task + index * self.parts + part,
                start=row,
                stop=min(row + self.batch_size, stop),
                pass_index=pass_index,
                round=self.begin.round + index if self.synchronous else 0,
                part=part,
                parts=len(starts),
                samples=(min(row + self.batch_size, stop) - row) * self.row_samples,
            )
            for part, row in enumerate(starts)
        )

    @property
    def end(self) -> Position:
        """Position at which the next epoch begins."""
        pass_index, row = self._place(len(self))
        return Position(pass_index, row, self.begin.task + len(self) * self.parts, self.begin.round + len(self))

    @property
    def rows(self) -> tuple[int, range]:
        """The pass of the epoch and its rows."""
        pass_index, start = self._place(0)
        return pass_index, range(start, min(start + len(self) * self.round_rows, self.samples))

    @property
    def round_rows(self) -> int:
        """Number of rows in one round; the last round of a pass may have fewer."""
        return self.batch_size * self.parts

    def _rounds_from(self, row: int) -> int:
        return -(-(self.samples - row) // self.round_rows)

    def _place(self, index: int) -> tuple[int, int]:
        row = self.begin.row + index * self.round_rows
        return (self.begin.pass_index, row) if row < self.samples else (self.begin.pass_index + 1, 0)
