"""Training and worker speeds of ``hetero``: one description for all peers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.workloads.models import SEED
from benchmarks.workloads.timed_epochs import Goal

BATCH = 32
LEARNING_RATE = 0.005  # for updates of one batch


@dataclass(frozen=True)
class Training:
    """One training on emulated workers.

    Attributes:
        data: ``.npz`` files of training and test images.
        samples: Number of samples per epoch; a multiple of the batches of all workers.
        step_s: Seconds per step for each worker; a step that finishes earlier sleeps.
        goal: Condition for the end of the training.
        seed: Seed of the initial weights and of the order of samples.
        closing: Whether workers validate after each epoch, and a ModelCheckpoint saves; only for jobs of NFDT.
        model: A case of :func:`benchmarks.workloads.models.build`; only for jobs of NFDT.
    """

    data: Path
    test_data: Path
    samples: int
    step_s: tuple[float, ...]
    goal: Goal
    batch: int = BATCH
    learning_rate: float = field(default=LEARNING_RATE)
    seed: int = SEED
    closing: bool = False
    model: str = "small"

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.step_s)

    @property
    def limit(self) -> float:
        """Samples per second if no worker waited: the sum of the workers' own speeds."""
        return sum(self.batch / seconds for seconds in self.step_s)

    def save(self, path: Path) -> None:
        """Write JSON for peers in other processes."""
        path.write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def load(cls, path: Path) -> Training:
        """Read the file that :meth:`save` wrote."""
        given = json.loads(path.read_text())
        paths = {name: Path(given[name]) for name in ("data", "test_data")}
        return cls(**{**given, **paths, "step_s": tuple(given["step_s"]), "goal": Goal(**given["goal"])})
