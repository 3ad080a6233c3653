"""What the peers of ``hetero`` train, and how slow each worker is made: one description for all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.workloads.timed_epochs import Goal

BATCH = 32
LEARNING_RATE = 0.005  # of one batch's update


@dataclass(frozen=True)
class Training:
    """One training on emulated workers.

    Attributes:
        data: ``.npz`` files of training and test images.
        samples: Of one epoch; whole batches of all workers.
        step_s: Seconds of a step of each worker; a step that is ready sooner sleeps.
        goal: When to end.
    """

    data: Path
    test_data: Path
    samples: int
    step_s: tuple[float, ...]
    goal: Goal
    batch: int = BATCH
    learning_rate: float = field(default=LEARNING_RATE)

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.step_s)

    @property
    def limit(self) -> float:
        """Samples per second if no worker ever waited: the sum of their own speeds."""
        return sum(self.batch / seconds for seconds in self.step_s)

    def save(self, path: Path) -> None:
        """As JSON, for peers in other processes."""
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, path: Path) -> Training:
        """What :meth:`save` wrote."""
        given = json.loads(path.read_text())
        paths = {name: Path(given[name]) for name in ("data", "test_data")}
        return cls(**{**given, **paths, "step_s": tuple(given["step_s"]), "goal": Goal(**given["goal"])})
