"""Pictures of the convergence study: a panel for each task, of its setting with the most results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from benchmarks.reports.chart import Panel, Points, draw
from benchmarks.reports.study import Case, Cluster, Study, is_default
from benchmarks.reports.study_results import Setting
from benchmarks.workloads.convergence_rows import ROWS
from benchmarks.workloads.tasks import TASKS

GREATEST_LOSS = 25.0  # points; rows that lose more would hide the others

DrawPanel = Callable[[Study, Setting], Panel | None]


def over_workers(study: Study) -> str | None:
    """Return the picture of the score over the number of equal workers; None without results."""
    return _drawn("Score over the number of equal workers, each row at its best rate", study, _workers_panel)


def over_time(study: Study) -> str | None:
    """Return the picture of the score over virtual time; None without results."""
    return _drawn("Score over virtual time, each row at its best rate", study, _time_panel)


def over_staleness(study: Study) -> str | None:
    """Return the picture of the loss against one machine over the mean staleness; None without results."""
    return _drawn("Points lost against one machine, over the mean staleness", study, _staleness_panel)


def _drawn(title: str, study: Study, panel: DrawPanel) -> str | None:
    settings = [setting for task in TASKS if (setting := _main_setting(study, task)) is not None]
    panels = [found for setting in settings if (found := panel(study, setting)) is not None]
    return draw(title, panels, list(ROWS)) if panels else None


def _main_setting(study: Study, task: str) -> Setting | None:
    settings = [setting for setting in study.settings([task]) if is_default(setting)]
    return max(settings, key=lambda setting: len(study.cases(setting)), default=None)


def _workers_panel(study: Study, setting: Setting) -> Panel | None:
    series: dict[str, list[tuple[float, float]]] = {}
    for case in _best(study, setting, lambda cluster: cluster.speeds == "equal"):
        series.setdefault(case.row, []).append((case.cluster.workers, study.mean(case)))
    alone = study.alone(setting)
    level = study.mean(alone) if alone else None
    sorted_series = {row: sorted(points) for row, points in series.items()}
    several = len({workers for points in series.values() for workers, _ in points}) > 1
    title = TASKS[setting.task].title
    panel = Panel(title, "workers", _score(setting), sorted_series, doubles=True, level=level)
    return panel if several else None


def _time_panel(study: Study, setting: Setting) -> Panel | None:
    clusters = [case.cluster for case in study.cases(setting)]
    if not clusters:
        return None
    cluster = max(dict.fromkeys(clusters), key=lambda c: (c.speeds == "unequal", clusters.count(c), c.workers))
    series = {case.row: _curve(study, case) for case in _best(study, setting, lambda c: c == cluster)}
    measured = f"{_score(setting)}, {cluster.workers} {cluster.speeds} workers"
    return Panel(TASKS[setting.task].title, "virtual seconds", measured, series) if series else None


def _curve(study: Study, case: Case) -> Points:
    """Return the means over the seeds at the end of each epoch."""
    epochs = zip(*(result.curve for result in study.results(case)), strict=True)
    return [
        (statistics.mean(at for at, _ in seeds), 100 * statistics.mean(score for _, score in seeds)) for seeds in epochs
    ]


def _staleness_panel(study: Study, setting: Setting) -> Panel | None:
    alone, series = study.alone(setting), dict[str, list[tuple[float, float]]]()
    if alone is None:
        return None
    for case in _best(study, setting, lambda cluster: True):
        lost = study.mean(alone) - study.mean(case)
        if lost <= GREATEST_LOSS:
            staleness = statistics.mean(result.mean_staleness for result in study.results(case))
            series.setdefault(case.row, []).append((staleness, lost))
    measured = f"points lost, {setting.epochs} epochs"
    return Panel(TASKS[setting.task].title, "mean staleness", measured, series, joined=False) if series else None


def _best(study: Study, setting: Setting, chosen: Callable[[Cluster], bool]) -> Iterable[Case]:
    """Yield each row at its best rate in the chosen clusters, without those that diverged."""
    for row, cluster in dict.fromkeys((case.row, case.cluster) for case in study.cases(setting)):
        case = study.best(setting, row, cluster) if chosen(cluster) else None
        if case is not None and not study.diverged(case):
            yield case


def _score(setting: Setting) -> str:
    return f"{TASKS[setting.task].metric} in %, {setting.epochs} epochs"
