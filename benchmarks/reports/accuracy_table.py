"""The planner's expected accuracy losses, from the results of the convergence study."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reports.study import Case, Cluster, Study, is_default
from benchmarks.reports.study_results import ROOT, Setting
from benchmarks.workloads.convergence_rows import ROWS
from benchmarks.workloads.tasks import TASKS
from nfdt.planning.accuracy import MeasuredTraining, measured_as

DATA_FILE = ROOT / "nfdt" / "planning" / "data" / "accuracy.json"
JUDGED = (
    *("ddc-asgd", "staleness-scaled", "dc-asgd-a", "dc-asgd-k", "asgd", "dc-asgd", "bsp", "n-softsync", "group-sync"),
)


def planner_name(row: str) -> str:
    """Return the planner's name of a row."""
    return measured_as(ROWS[row].algorithm)


def measured(study: Study) -> list[MeasuredTraining]:
    """Return the trainings for the planner: those with SGD whose score is an accuracy, and that one machine did, too.

    Returns:
        The trainings; none unless together they have every judged row.
    """
    settings = [s for s in study.settings() if is_default(s) and s.optimizer == "sgd" and study.alone(s)]
    found = [_training(study, s) for s in settings if TASKS[s.task].metric == "accuracy"]
    names = {name for training in found for name in training.rows}
    return found if {planner_name(row) for row in JUDGED} <= names else []


def _training(study: Study, setting: Setting) -> MeasuredTraining:
    rows: dict[str, dict[int, float | None]] = {}
    lower: dict[str, dict[int, tuple[int, float]]] = {}
    for row in JUDGED:
        speeds = _speeds(study, setting, row)
        own = [c for c in study.cases(setting) if c.row == row and c.cluster.speeds == speeds]
        cases = [case for case in own if case.rate == study.rate(setting)]
        diverged = any(map(study.diverged, cases))
        if cases:
            rows[planner_name(row)] = {c.cluster.workers: None if diverged else _rounded(study, c) for c in cases}
        if diverged:
            lower[planner_name(row)] = _at_lower_rates(study, setting, own)
    one = round(study.mean(study.one_machine(setting, study.rate(setting))), 1)
    return MeasuredTraining(f"{TASKS[setting.task].title}, {setting.updates:,} updates", one, rows, lower)


def _speeds(study: Study, setting: Setting, row: str) -> str:
    """Return ``unequal`` for a row that was trained on unequal workers only, else ``equal``."""
    return "equal" if any(c.row == row and c.cluster.speeds == "equal" for c in study.cases(setting)) else "unequal"


def _at_lower_rates(study: Study, setting: Setting, cases: Sequence[Case]) -> dict[int, tuple[int, float]]:
    """Return the divisor of the rate with a row's best accuracy, and that accuracy, by number of workers."""
    best: dict[Cluster, Case] = {}
    for case in (case for case in cases if case.rate < study.rate(setting)):
        known = best.setdefault(case.cluster, case)
        best[case.cluster] = max(known, case, key=study.mean)
    return {
        cluster.workers: (round(study.rate(setting) / case.rate), _rounded(study, case))
        for cluster, case in sorted(best.items(), key=lambda item: item[0].workers)
    }


def _rounded(study: Study, case: Case) -> float:
    return round(study.mean(case), 1)
