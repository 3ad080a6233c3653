"""Result files of the convergence study: one JSON object per line, one line per training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Setting:
    """Description of a training that those it is compared with share.

    Attributes:
        task: Name of the task.
        epochs: Number of epochs.
        samples: Training samples per epoch.
        batch: Size of a local batch.
        optimizer: Name of the optimizer.
        momentum: Momentum of SGD; None for other optimizers.
        weight_decay: Decoupled weight decay.
        split: ``test``, or ``validation``: a part of the training samples is evaluated instead of the test samples.
    """

    task: str
    epochs: int
    samples: int
    batch: int
    optimizer: str
    momentum: float | None
    weight_decay: float
    split: str = "test"

    @property
    def updates(self) -> int:
        """Number of gradients, which is that of one machine's updates."""
        return self.epochs * -(-self.samples // self.batch)


@dataclass(frozen=True)
class Training:
    """Identity of one training: two lines of the same identity hold the same result.

    Attributes:
        setting: See :class:`Setting`.
        row: Name of the row.
        workers: Number of workers.
        speeds: Name of the cluster's speeds.
        rate: Learning rate of one machine.
        seed: Seed of the initial weights and of the order of samples.
    """

    setting: Setting
    row: str
    workers: int
    speeds: str
    rate: float
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the identity as the first part of a line."""
        own = {name: value for name, value in vars(self).items() if name != "setting"}
        return {**asdict(self.setting), "updates": self.setting.updates, **own}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Training:
        """Read the identity from a line."""
        setting = Setting(**{each.name: line[each.name] for each in fields(Setting)})
        own = {each.name: line[each.name] for each in fields(cls) if each.name != "setting"}
        return cls(setting, **own)


@dataclass(frozen=True)
class Result:
    """Result of one training.

    Attributes:
        training: Its identity.
        score: Score after the last epoch, a fraction.
        curve: Virtual seconds and score at the end of each epoch.
        virtual_s: Virtual seconds of the training.
        of_limit: Speed as a share of the sum of the workers' own speeds.
        mean_staleness: Mean number of updates that a gradient missed.
        loss: Test loss after the last epoch; None: not finite.
        staleness: Number of gradients by staleness.
        worker_staleness: Mean staleness of each worker; empty in results from before it was recorded.
    """

    training: Training
    score: float
    curve: Sequence[tuple[float, float]]
    virtual_s: float
    of_limit: float
    mean_staleness: float
    loss: float | None = None
    staleness: Mapping[str, int] = field(default_factory=dict)
    worker_staleness: Sequence[float] = ()


class ResultFile:
    """A file that grows by a line per training.

    Args:
        path: The file; None: results are kept in memory only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lines = read_lines([path]) if path is not None and path.exists() else []
        self._known = {Training.from_json(line) for line in self.lines}

    def __contains__(self, training: Training) -> bool:
        return training in self._known

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; it is in the file when this returns."""
        self.lines.append(dict(line))
        self._known.add(Training.from_json(line))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")


def read_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the objects of all lines.

    Raises:
        ValueError: a line is no JSON object.
    """
    found = []
    for file in files:
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: expected a JSON object. Received: {text[:60]!r}. Remove the line."
                ) from error
    return found


def read_results(folder: Path = FOLDER) -> list[Result]:
    """Return the results of all ``.jsonl`` files of a folder, each training once, without those that failed."""
    found: dict[Training, Result] = {}
    for line in read_lines(sorted(folder.glob("*.jsonl"))):
        if "error" not in line:
            figures = {each.name: line[each.name] for each in fields(Result) if each.name in line}
            training = Training.from_json(line)
            found.setdefault(training, Result(training, **figures))
    return list(found.values())
