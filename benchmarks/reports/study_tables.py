"""Tables of the convergence study in Markdown; their rows and columns follow from the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.reports.study import Case, Cluster, Study
from benchmarks.reports.study_results import Setting
from benchmarks.workloads.convergence_rows import ROWS
from benchmarks.workloads.tasks import TASKS

STEADY, CHANGING = ("equal", "unequal"), ("slowed", "changing")
TARGET_SHARE = 0.95  # of one machine's score, that the time until then is given for

Write = Callable[[Case], str]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and sample standard deviation, as in ``87.0 ± 0.1``; the deviation only of several seeds."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def at_one_machines_rate(study: Study, settings: Iterable[Setting], speeds: Sequence[str] = STEADY) -> str:
    """Return a table for each setting, of all rows at the best rate of one machine."""
    return _joined(_scores(study, setting, study.rate(setting), speeds) for setting in settings)


def at_other_rates(study: Study, settings: Iterable[Setting], speeds: Sequence[str] = STEADY) -> str:
    """Return a table for each setting and each rate besides that of one machine, and one of each row's best rate."""
    parts = []
    for setting in settings:
        rates = dict.fromkeys(case.rate for case in study.cases(setting))
        others = [rate for rate in rates if rate != study.rate(setting)]
        parts += [_scores(study, setting, rate, speeds) for rate in others]
        if others:
            parts.append(_best_rates(study, setting, speeds))
    return _joined(parts)


def in_changing_clusters(study: Study, settings: Iterable[Setting]) -> str:
    """Return a table for each setting of clusters whose speeds change, beside the same number of equal workers."""
    parts = []
    for setting in settings:
        changing = {c.cluster.workers for c in study.cases(setting) if c.cluster.speeds in CHANGING}
        speeds = ("equal", *CHANGING)
        parts.append(_scores(study, setting, study.rate(setting), speeds, changing) if changing else "")
    return _joined(parts)


def in_virtual_time(study: Study, settings: Iterable[Setting]) -> str:
    """Return a table for each setting of virtual seconds, of the share of the limit, and of seconds to a target."""
    return _joined(_times(study, setting) for setting in settings if study.alone(setting))


def in_smaller_batches(study: Study, settings: Iterable[Setting]) -> str:
    """Return a table of scores by local batch, each at the best of its rates, beside one machine with its own batch."""
    lines = []
    for setting in settings:
        usual = replace(setting, batch=TASKS[setting.task].batch)
        for small in _best_cases(study, setting, STEADY):
            cases = (study.alone(usual), study.best(usual, small.row, small.cluster), small)
            known = [case for case in cases if case is not None]
            if len(known) == len(cases):
                cells = (f"{spread(study.scores(c))} ({c.setting.batch}, {c.rate:g})" for c in known)
                lines.append(
                    f"| {TASKS[setting.task].title}, {setting.epochs} epochs "
                    f"| `{small.row}` | {small.cluster.workers} {small.cluster.speeds} | {' | '.join(cells)} |"
                )
    head = "| task | row | workers | one machine | its batch on each worker | a smaller one |"
    return "\n".join([head, "|---" * 6 + "|", *lines]) if lines else ""


def best_presets(study: Study, settings: Iterable[Setting]) -> str:
    """Return a table of the preset with the best score, and of the one that is soonest at a target, by cluster."""
    lines = []
    for setting in settings:
        alone = study.alone(setting)
        presets = [case for case in _best_cases(study, setting, STEADY) if ROWS[case.row].preset == case.row]
        for cluster in sorted({case.cluster for case in presets}, key=lambda cluster: cluster.order):
            here = [case for case in presets if case.cluster == cluster]
            if alone is not None and len(here) > 1:
                lines.append(_best_preset(study, alone, here))
    head = "| task | workers | best score | points below one machine | soonest to 95 % of its score |"
    return "\n".join([head, "|---" * 5 + "|", *lines]) if lines else ""


def _best_preset(study: Study, alone: Case, cases: Sequence[Case]) -> str:
    best, target = max(cases, key=study.mean), _target(study, alone)
    times = {case: seconds for case in cases if (seconds := _seconds_to(study, case, target)) is not None}
    soonest = min(times, key=lambda case: times[case], default=None)
    first = f"`{soonest.row}`, {times[soonest]:.1f} s" if soonest else "none"
    cluster, title = best.cluster, TASKS[best.setting.task].title
    lost = study.mean(alone) - study.mean(best)
    return (
        f"| {title}, {best.setting.epochs} epochs | {cluster.workers} {cluster.speeds} "
        f"| `{best.row}`, {study.mean(best):.1f} % | {lost:.1f} | {first} |"
    )


def described(setting: Setting) -> str:
    """Return a setting in words."""
    options = {"momentum": setting.momentum, "weight decay": setting.weight_decay}
    given = " and ".join(f"{name} {value:g}" for name, value in options.items() if value)
    optimizer = {"adamw": "AdamW", "sgd": "SGD"}[setting.optimizer] + (f" with {given}" if given else "")
    length = f"{setting.epochs} epochs ({setting.updates:,} updates)"
    return f"**{TASKS[setting.task].title}**, {length}, {optimizer}"


def _scores(
    study: Study, setting: Setting, rate: float, speeds: Sequence[str], sizes: Iterable[int] | None = None
) -> str:
    cases = [
        case
        for case in study.cases(setting)
        if case.rate == rate and case.cluster.speeds in speeds and (sizes is None or case.cluster.workers in sizes)
    ]
    if not cases:
        return ""
    alone = study.scores(study.one_machine(setting, rate))
    lead = f"{described(setting)}, lr {rate:g}.\n{_measure(study, setting, cases)}"
    lead += f"; one machine: {spread(alone)}." if alone else "."
    return f"{lead}\n\n" + _table(study, cases, lambda case: spread(study.scores(case)))


def _best_rates(study: Study, setting: Setting, speeds: Sequence[str]) -> str:
    cases = _best_cases(study, setting, speeds)
    lead = f"{described(setting)}.\nEvery row is at the best of its rates.\n{_measure(study, setting, cases)} (rate)."
    table = _table(study, cases, lambda case: f"{spread(study.scores(case))} ({case.rate:g})")
    return f"{lead}\n\n{table}" if cases else ""


def _times(study: Study, setting: Setting) -> str:
    alone = study.alone(setting)
    cases = _best_cases(study, setting, STEADY)
    if alone is None or not cases:
        return ""
    target = _target(study, alone)
    lead = f"{described(setting)}.\nEvery row is at the best of its rates."
    rule = "A cell holds virtual seconds, the share of the sum of the workers' own speeds, and virtual seconds to"
    one = _time(study, alone, target)
    return f"{lead}\n{rule} {100 * target:.0f} %.\nOne machine: {one}.\n\n" + _table(
        study, cases, lambda case: _time(study, case, target), bold=False
    )


def _time(study: Study, case: Case, target: float) -> str:
    results, reached = study.results(case), _seconds_to(study, case, target)
    to_target = "not reached" if reached is None else f"{reached:.1f} s"
    seconds, share = statistics.mean(r.virtual_s for r in results), statistics.mean(r.of_limit for r in results)
    return f"{seconds:.1f} s, {share:.2f}, {to_target}"


def _target(study: Study, alone: Case) -> float:
    """Return the score at which times are compared, a share of one machine's."""
    return round(TARGET_SHARE * study.mean(alone) / 100, 2)


def _seconds_to(study: Study, case: Case, target: float) -> float | None:
    """Return the mean virtual seconds to a score at the end of an epoch; None if a seed did not reach it."""
    reached = [next((at for at, score in r.curve if score >= target), None) for r in study.results(case)]
    known = [at for at in reached if at is not None]
    return statistics.mean(known) if len(known) == len(reached) else None


def _best_cases(study: Study, setting: Setting, speeds: Sequence[str]) -> list[Case]:
    places = dict.fromkeys((c.row, c.cluster) for c in study.cases(setting) if c.cluster.speeds in speeds)
    found = (study.best(setting, row, cluster) for row, cluster in places)
    return [case for case in found if case is not None]


def _measure(study: Study, setting: Setting, cases: Sequence[Case]) -> str:
    """Return what the cells hold, and how many seeds they are of."""
    metric = TASKS[setting.task].metric
    counts = sorted({len(study.results(case)) for case in cases})
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"{metric[0].upper()}{metric[1:]} in %, {many} seed{'' if many == '1' else 's'}"


def _table(study: Study, cases: Sequence[Case], write: Write, *, bold: bool = True) -> str:
    """Return a table of rows by clusters; the best score of each cluster is in bold print."""
    clusters = sorted({case.cluster for case in cases}, key=lambda cluster: cluster.order)
    best = {max((c for c in cases if c.cluster == cluster), key=study.mean) for cluster in clusters} if bold else set()
    rows: dict[str, dict[Cluster, str]] = {}
    for case in sorted(cases, key=lambda case: list(ROWS).index(case.row)):
        text = write(case)
        rows.setdefault(case.row, {})[case.cluster] = f"**{text}**" if case in best else text
    lines = ["| row | " + " | ".join(f"{c.workers} {c.speeds}" for c in clusters) + " |"]
    lines.append("|---" * (len(clusters) + 1) + "|")
    return "\n".join([*lines, *(_line(row, cells, clusters) for row, cells in rows.items())])


def _line(row: str, cells: Mapping[Cluster, str], clusters: Sequence[Cluster]) -> str:
    return f"| `{row}` | " + " | ".join(cells.get(cluster, "") for cluster in clusters) + " |"


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)
