"""Score after equal samples on simulated clusters, with real gradients: many trainings, one line of results each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks.reports.report import versions
from benchmarks.reports.study_results import FOLDER, ResultFile, Setting, Training
from benchmarks.workloads.clusters import SPEEDS, expected_seconds, machines
from benchmarks.workloads.convergence_rows import MAIN, ROWS, SEQUENTIAL, batches_per_update
from benchmarks.workloads.device import device_name
from benchmarks.workloads.reference_rules import reference_rules
from benchmarks.workloads.tasks import TASKS
from benchmarks.workloads.tasks.task import SPLITS, StudyTask, TaskData
from benchmarks.workloads.virtual import Trained, VirtualTraining
from nfdt.core.errors import NfdtError
from nfdt.simulate.results import described_limits

OPTIMIZERS = ("sgd", "adamw")
RESULTS = FOLDER / "convergence.jsonl"


@dataclass(frozen=True)
class Plan:
    """Trainings of one run; None: as the task has it.

    Attributes:
        task: Name in ``TASKS``.
        rows: Names in ``ROWS``.
        workers: Numbers of workers.
        speeds: Names in ``SPEEDS``.
        rates: Learning rates; every row is trained at each.
        seeds: Seeds; every row is trained with each.
        epochs: Number of epochs of each training.
        samples: Largest number of training samples; None: all.
        batch: Size of a local batch.
        optimizer: Name in ``OPTIMIZERS``.
        momentum: Momentum of SGD.
        weight_decay: Decoupled weight decay of the optimizer.
        split: Samples that are evaluated, a name in ``SPLITS``.
    """

    task: str = "fashion-mnist"
    rows: Sequence[str] = MAIN
    workers: Sequence[int] = (8, 16, 32)
    speeds: Sequence[str] = ("equal", "unequal")
    rates: Sequence[float] | None = None
    seeds: Sequence[int] = (0, 1, 2)
    epochs: int | None = None
    samples: int | None = None
    batch: int | None = None
    optimizer: str | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    split: str = "test"


QUICK: dict[str, Any] = {
    **{"rows": (SEQUENTIAL, "ddc-asgd", "asgd", "dc-asgd-a"), "workers": (8,), "speeds": ("equal",), "seeds": (0,)},
    **{"epochs": 2, "samples": 512, "batch": 16},
}


def setting_of(plan: Plan, task: StudyTask, data: TaskData) -> Setting:
    """Return the setting of a plan's trainings, with the task's defaults."""
    optimizer = plan.optimizer or task.optimizer
    momentum = task.momentum if plan.momentum is None else plan.momentum
    decay = task.weight_decay if plan.weight_decay is None else plan.weight_decay
    return Setting(
        data.name,
        plan.epochs or task.epochs,
        len(data.train[0]),
        plan.batch or task.batch,
        optimizer,
        momentum if optimizer == "sgd" else None,
        decay,
        plan.split,
    )


def make_optimizer(setting: Setting, rate: float, updates: int) -> keras.optimizers.Optimizer:
    """Return the optimizer of a setting; warm-up over a fifth of the updates, then a cosine to zero."""
    warmup = max(1, updates // 5)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, updates - warmup), warmup_target=rate, warmup_steps=warmup
    )
    if setting.optimizer == "sgd":
        decay = setting.weight_decay or None
        return keras.optimizers.SGD(schedule, momentum=setting.momentum, weight_decay=decay)
    return keras.optimizers.AdamW(schedule, weight_decay=setting.weight_decay)


class Study:
    """The trainings of one plan.

    Args:
        plan: The plan.
        results: File of the results; trainings in it are not repeated.
        data: Samples of the task.
    """

    def __init__(self, plan: Plan, results: ResultFile, data: TaskData) -> None:
        self._plan, self._results, self._task = plan, results, TASKS[plan.task]
        self._data = data.split(plan.split).take(plan.samples)
        self.setting = setting_of(plan, self._task, self._data)
        self._training = VirtualTraining(
            self._build, self._data.train, self._data.test, self.setting.batch, self.setting.epochs
        )

    def run(self) -> None:
        """Train every seed of each row, every row of each cluster, every cluster at each rate."""
        with reference_rules():
            for training in self._trainings():
                if training not in self._results:
                    line = {**training.to_json(), **self._result(training), **self._environment()}
                    self._results.append(line)
                    print(_described(line), flush=True)

    def _trainings(self) -> Iterator[Training]:
        for rate in self._plan.rates or (self._task.rate,):
            for row, workers, speeds in self._cases():
                for seed in self._plan.seeds:
                    yield Training(self.setting, row, workers, speeds, rate, seed)

    def _cases(self) -> Iterator[tuple[str, int, str]]:
        if SEQUENTIAL in self._plan.rows:
            yield SEQUENTIAL, 1, "equal"
        for workers in self._plan.workers:
            for speeds in self._plan.speeds:
                yield from ((row, workers, speeds) for row in self._plan.rows if row != SEQUENTIAL)

    def _build(self, seed: int, rate: float, updates: int) -> keras.Model:
        return self._task.build(seed, make_optimizer(self.setting, rate, updates))

    def _result(self, training: Training) -> dict[str, Any]:
        """Train, and return the result, or what failed."""
        row, workers = ROWS[training.row], training.workers
        cluster = machines(workers, training.speeds, expected_seconds(self.setting.updates, workers))
        try:
            trained = self._training.run(
                row.preset,
                cluster,
                seed=training.seed,
                rate=row.rate(training.rate, workers),
                merged=batches_per_update(row.algorithm, workers),
                overrides=row.options,
            )
        except NfdtError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return self._figures(trained, described_limits(cluster, self.setting.batch)["samples_per_s"])

    def _figures(self, trained: Trained, limit: float) -> dict[str, Any]:
        record, targets = trained.record, self._data.test[1]
        curve = [[round(p.at_s, 3), round(self._task.score(p.logs, targets), 6)] for p in trained.epochs]
        last = trained.epochs[-1].logs
        loss = float(last["val_loss"])
        return {
            "metric": self._task.metric,
            "score": curve[-1][1],
            "loss": round(loss, 6) if np.isfinite(loss) else None,
            **{name: round(value, 6) for name, value in self._task.more(last, targets).items()},
            "curve": curve,
            "virtual_s": round(record.seconds, 3),
            "of_limit": round(record.samples / record.seconds / limit, 4),
            "mean_staleness": round(record.mean_staleness, 3),
            "max_staleness": record.most_staleness,
            "staleness": {str(tau): count for tau, count in sorted(record.staleness.items())},
            "dropped": record.dropped,
            "wall_s": round(trained.wall_s, 1),
            "gradient_s": round(trained.gradient_s, 1),
        }

    @staticmethod
    def _environment() -> dict[str, Any]:
        return {"backend": keras.backend.backend(), "device": device_name(), "versions": versions()}


def _described(line: dict[str, Any]) -> str:
    case = " ".join(str(line[name]) for name in ("task", "row", "workers", "speeds", "rate", "seed"))
    return f"{case}: {line.get('error') or '{metric} {score:.4f}'.format(**line)}"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default=Plan.task)
    parser.add_argument("--results", type=Path, help=f"file to append to; default: {RESULTS.name}, none with --quick")
    parser.add_argument("--quick", action="store_true", help="one seed of three presets, less data; within a minute")
    parser.add_argument("--data-dir", type=Path, help="folder with the data of the task")
    parser.add_argument("--rows", type=_names, help=f"only these of {', '.join(ROWS)}")
    parser.add_argument("--workers", type=_numbers(int), help="sizes of clusters, as in 8,16,32")
    parser.add_argument("--speeds", type=_names, help=f"of {', '.join(SPEEDS)}")
    parser.add_argument("--rates", type=_numbers(float), help="learning rates of one machine, as in 0.1,0.02")
    parser.add_argument("--seeds", type=lambda text: tuple(range(int(text))), help="how many; default 3")
    parser.add_argument("--split", choices=SPLITS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    for name, kind in {"momentum": float, "weight_decay": float, "epochs": int, "samples": int, "batch": int}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = parser.parse_args(arguments)
    for name, known in {"rows": ROWS, "speeds": SPEEDS}.items():
        if unknown := [each for each in getattr(options, name) or () if each not in known]:
            parser.error(f"--{name}: expected some of {', '.join(known)}. Received: {', '.join(unknown)}.")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(kind: type) -> Any:
    return lambda text: tuple(map(kind, text.split(",")))


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan of a command line."""
    given = {name: value for name in vars(Plan()) if (value := getattr(options, name)) is not None}
    return replace(Plan(), **{**(QUICK if options.quick else {}), **given})


def main() -> None:
    options = options_of(sys.argv[1:])
    plan = plan_of(options)
    path = options.results or (None if options.quick else RESULTS)
    Study(plan, ResultFile(path), TASKS[plan.task].read(options.data_dir)).run()


if __name__ == "__main__":
    main()
