"""Which trainings of the convergence study one command makes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.reports.study_results import FOLDER, Setting, Training
from benchmarks.workloads.clusters import SPEEDS, speeds_and_link
from benchmarks.workloads.convergence_rows import MAIN, ROWS, SEQUENTIAL
from benchmarks.workloads.tasks import TASKS
from benchmarks.workloads.tasks.task import SPLITS

OPTIMIZERS = ("sgd", "adamw")
RESULTS = FOLDER / "convergence.jsonl"


@dataclass(frozen=True)
class Plan:
    """Trainings of one run; None: as the task has it.

    Attributes:
        task: Name in ``TASKS``.
        rows: Names in ``ROWS``.
        workers: Numbers of workers.
        speeds: Names in ``SPEEDS``, with the rate of a link where one is described.
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


def setting_of(plan: Plan, data: str, samples: int) -> Setting:
    """Return the setting of a plan's trainings, with the task's defaults.

    Args:
        plan: The plan.
        data: Name of the data.
        samples: Number of training samples.
    """
    task = TASKS[plan.task]
    optimizer = plan.optimizer or task.optimizer
    momentum = task.momentum if plan.momentum is None else plan.momentum
    return Setting(
        data,
        plan.epochs or task.epochs,
        samples,
        plan.batch or task.batch,
        optimizer,
        momentum if optimizer == "sgd" else None,
        task.weight_decay if plan.weight_decay is None else plan.weight_decay,
        plan.split,
    )


def rates_of(plan: Plan) -> Sequence[float]:
    """Return the learning rates of a plan."""
    return plan.rates or (TASKS[plan.task].rate,)


def trainings(plan: Plan, setting: Setting) -> Iterator[Training]:
    """Yield every seed of each row, every row of each cluster, every cluster at each rate."""
    for rate in rates_of(plan):
        for row, workers, speeds in _cases(plan):
            for seed in plan.seeds:
                yield Training(setting, row, workers, speeds, rate, seed)


def _cases(plan: Plan) -> Iterator[tuple[str, int, str]]:
    if SEQUENTIAL in plan.rows:
        yield SEQUENTIAL, 1, "equal"
    for workers in plan.workers:
        for speeds in plan.speeds:
            yield from ((row, workers, speeds) for row in plan.rows if row != SEQUENTIAL)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default=Plan.task)
    parser.add_argument("--results", type=Path, help=f"file to append to; default: {RESULTS.name}, none with --quick")
    parser.add_argument("--quick", action="store_true", help="one seed of three presets, less data; within a minute")
    parser.add_argument("--data-dir", type=Path, help="folder with the data of the task")
    parser.add_argument("--rows", type=_names, help=f"only these of {', '.join(ROWS)}")
    parser.add_argument("--workers", type=_numbers(int), help="sizes of clusters, as in 8,16,32")
    parser.add_argument("--speeds", type=_names, help=f"of {', '.join(SPEEDS)}, also over links, as in unequal@100")
    parser.add_argument("--rates", type=_numbers(float), help="learning rates of one machine, as in 0.1,0.02")
    parser.add_argument("--seeds", type=lambda text: tuple(range(int(text))), help="how many; default 3")
    parser.add_argument("--split", choices=SPLITS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    for name, kind in {"momentum": float, "weight_decay": float, "epochs": int, "samples": int, "batch": int}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = parser.parse_args(arguments)
    if unknown := [row for row in options.rows or () if row not in ROWS]:
        parser.error(f"--rows: expected some of {', '.join(ROWS)}. Received: {', '.join(unknown)}.")
    for speeds in options.speeds or ():
        try:
            speeds_and_link(speeds)
        except ValueError as error:
            parser.error(f"--speeds: {error}")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(kind: type) -> Any:
    return lambda text: tuple(map(kind, text.split(",")))


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan of a command line."""
    given = {name: value for name in vars(Plan()) if (value := getattr(options, name)) is not None}
    return replace(Plan(), **{**(QUICK if options.quick else {}), **given})
