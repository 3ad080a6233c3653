"""Results of the convergence study by setting, row, cluster and rate, and the rates that are compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.reports.study_results import Result, Setting
from benchmarks.workloads.clusters import SPEEDS, speeds_and_link
from benchmarks.workloads.convergence_rows import ROWS, SEQUENTIAL
from benchmarks.workloads.tasks import TASKS

DIVERGED_MARGIN = 0.01  # of the score above that of chance


@dataclass(frozen=True)
class Cluster:
    """Number of workers and name of their speeds; in the order of tables."""

    workers: int
    speeds: str

    @property
    def order(self) -> tuple[int, int, float]:
        """Place of the cluster in a table."""
        speeds, mbit = speeds_and_link(self.speeds)
        return self.workers, list(SPEEDS).index(speeds), mbit or 0.0


@dataclass(frozen=True)
class Case:
    """Trainings that differ in the seed alone."""

    setting: Setting
    row: str
    cluster: Cluster
    rate: float


ALONE = Cluster(1, "equal")


class Study:
    """All results of known tasks.

    Args:
        results: The results.

    Attributes:
        all_results: The results.
    """

    def __init__(self, results: Iterable[Result]) -> None:
        self._cases: dict[Case, list[Result]] = {}
        self.all_results = list(results)
        for result in self.all_results:
            t = result.training
            if t.setting.task in TASKS:
                case = Case(t.setting, t.row, Cluster(t.workers, t.speeds), t.rate)
                self._cases.setdefault(case, []).append(result)

    def settings(self, tasks: Sequence[str] = tuple(TASKS), split: str = "test") -> list[Setting]:
        """Return the settings of some tasks whose samples of this split were evaluated, in the order of tables."""
        found = {case.setting for case in self._cases if case.setting.task in tasks and case.setting.split == split}
        names = list(TASKS)
        return sorted(found, key=lambda setting: (names.index(setting.task), setting.updates, repr(setting)))

    def cases(self, setting: Setting) -> list[Case]:
        """Return the cases of a setting among several workers, in the order of tables."""
        found = [case for case in self._cases if case.setting == setting and case.row != SEQUENTIAL]
        names = list(ROWS)
        return sorted(found, key=lambda case: (-case.rate, names.index(case.row), case.cluster.order))

    def results(self, case: Case) -> list[Result]:
        """Return the results of a case, one for each seed."""
        return self._cases.get(case, [])

    def scores(self, case: Case) -> list[float]:
        """Return the scores of a case in %, one for each seed."""
        return [100 * result.score for result in self.results(case)]

    def mean(self, case: Case) -> float:
        """Return the mean score of a case in %."""
        return statistics.mean(self.scores(case))

    def diverged(self, case: Case) -> bool:
        """Return whether the mean score of a case is not above that of chance."""
        return self.mean(case) < 100 * (TASKS[case.setting.task].chance + DIVERGED_MARGIN)

    def best(self, setting: Setting, row: str, cluster: Cluster) -> Case | None:
        """Return the case with a row's best rate; None if there is none.

        The best rate is that of the validation samples if the row was evaluated on them, else of the test samples.
        """
        found = [case for case in self._cases if (case.setting, case.row, case.cluster) == (setting, row, cluster)]
        judged = {case: self._validation(case) for case in found}
        scores = {case: score for case, score in judged.items() if score is not None}
        return max(scores or found, key=lambda case: scores.get(case, self.mean(case)), default=None)

    def alone(self, setting: Setting) -> Case | None:
        """Return the case of one machine at its best rate."""
        return self.best(setting, SEQUENTIAL, ALONE)

    def one_machine(self, setting: Setting, rate: float) -> Case:
        """Return the case of one machine at a rate, which may have no results."""
        return Case(setting, SEQUENTIAL, ALONE, rate)

    def rate(self, setting: Setting) -> float:
        """Return the best rate of one machine; the greatest of a setting that one machine was not trained with."""
        alone = self.alone(setting)
        return alone.rate if alone else max(case.rate for case in self.cases(setting))

    def _validation(self, case: Case) -> float | None:
        """Return the mean score of a case on the validation samples, of which fewer are left for training."""
        wanted = replace(case, setting=replace(case.setting, samples=0))
        scores = [
            self.mean(other)
            for other in self._cases
            if other.setting.split == "validation"
            and replace(other, setting=replace(other.setting, samples=0, split="test")) == wanted
        ]
        return max(scores, default=None)


def is_default(setting: Setting) -> bool:
    """Return whether a setting has the optimizer and the batch of its task."""
    return has_optimizer(setting) and setting.batch == TASKS[setting.task].batch


def has_optimizer(setting: Setting) -> bool:
    """Return whether a setting has the optimizer of its task."""
    task = TASKS[setting.task]
    momentum = task.momentum if task.optimizer == "sgd" else None
    chosen = (setting.optimizer, setting.momentum, setting.weight_decay)
    return chosen == (task.optimizer, momentum, task.weight_decay)
