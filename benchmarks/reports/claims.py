"""Claims of publications beside our figures: what was trained for a claim, and the table of a publication."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.reports.study_results import FOLDER, Result
from benchmarks.reports.study_tables import spread
from benchmarks.workloads.convergence_rows import SEQUENTIAL
from benchmarks.workloads.study_plan import Plan, options_of, plan_of, rates_of, setting_of, trainings

TRAINED = "convergence "


class NotMeasured(LookupError):
    """A training that a claim needs has no result."""


@dataclass(frozen=True)
class RowResults:
    """Results that differ in the seed alone.

    Attributes:
        row: Name of the row.
        results: One result for each seed.
    """

    row: str
    results: Sequence[Result]

    @property
    def rate(self) -> float:
        """Learning rate of one machine."""
        return self.results[0].training.rate

    @property
    def score(self) -> float:
        """Mean score in %."""
        return 100 * statistics.mean(result.score for result in self.results)

    @property
    def loss(self) -> float:
        """Mean test loss; infinite if a training has no finite one."""
        return statistics.mean(math.inf if r.loss is None else r.loss for r in self.results)

    @property
    def seconds(self) -> float:
        """Mean virtual seconds of a training."""
        return statistics.mean(result.virtual_s for result in self.results)

    @property
    def of_limit(self) -> float:
        """Mean speed as a share of the sum of the workers' own speeds."""
        return statistics.mean(result.of_limit for result in self.results)

    @property
    def pushes(self) -> float:
        """Mean number of gradients that reach the server in an epoch."""
        return statistics.mean(sum(r.staleness.values()) / r.training.setting.epochs for r in self.results)

    @property
    def worker_staleness(self) -> list[float]:
        """Mean staleness of each worker.

        Raises:
            NotMeasured: the results are from before it was recorded.
        """
        if not all(result.worker_staleness for result in self.results):
            raise NotMeasured(f"{self.row}: expected results with the staleness of each worker.")
        return [statistics.mean(each) for each in zip(*(r.worker_staleness for r in self.results), strict=True)]

    def seconds_to(self, score: float) -> float:
        """Return the mean virtual seconds to a score in %, at the end of an epoch; infinite if a seed lacks it."""
        return statistics.mean(
            next((at for at, reached in r.curve if 100 * reached >= score), math.inf) for r in self.results
        )

    @property
    def scores(self) -> str:
        """Row, and mean and deviation of the score in %."""
        return f"`{self.row}` {spread([100 * result.score for result in self.results])}"

    @property
    def losses(self) -> str:
        """Row, and mean and deviation of the test loss."""
        if math.isinf(self.loss):
            return f"`{self.row}` diverged"
        return f"`{self.row}` {spread([float(r.loss or 0) for r in self.results], digits=3)}"


class CommandResults:
    """Results of the trainings of one command.

    Args:
        command: Name and arguments of the benchmark ``convergence``.
        results: All results; those of other trainings are left out.
    """

    def __init__(self, command: str, results: Iterable[Result]) -> None:
        self._command, self.plan = command, plan_of_command(command)
        self._cases: dict[tuple[str, int, str, float], list[Result]] = {}
        for result in results:
            if _belongs(result, self.plan):
                t = result.training
                self._cases.setdefault((t.row, t.workers, t.speeds, t.rate), []).append(result)

    @property
    def count(self) -> str:
        """Number of seeds of each row, in words."""
        return _counted({len(results) for results in self._cases.values()}, "seed")

    def best(self, row: str, workers: int | None = None, speeds: str | None = None) -> RowResults:
        """Return a row at the best of its rates, by the mean score; workers and speeds are by default the first.

        Raises:
            NotMeasured: a rate has no result.
        """
        return max(self._rates(row, workers, speeds), key=lambda case: case.score)

    def measured(self, rows: Collection[str], workers: int, speeds: str) -> list[RowResults]:
        """Return those of the rows that have been trained, the best first."""
        found = []
        for row in rows:
            with contextlib.suppress(NotMeasured):
                found.append(self.best(row, workers, speeds))
        return sorted(found, key=lambda case: (-case.score, case.row))

    def _rates(self, row: str, workers: int | None, speeds: str | None) -> list[RowResults]:
        place = (row, workers or self.plan.workers[0], speeds or self.plan.speeds[0])
        if row == SEQUENTIAL:
            place = (row, 1, "equal")
        found = [RowResults(row, results) for key, results in self._cases.items() if key[:3] == place]
        if len(found) < len(rates_of(self.plan)):
            raise NotMeasured(f"{self._command}: expected a result of {' '.join(map(str, place))}.")
        return found


class ReportFigures:
    """Figures of a benchmark of real workers, from its JSON report in ``benchmarks/results``.

    Args:
        command: Name and arguments of the benchmark.

    Raises:
        NotMeasured: there is no report.
    """

    def __init__(self, command: str) -> None:
        self._path = FOLDER / f"{command.split()[0]}.json"
        if not self._path.exists():
            raise NotMeasured(f"{command}: expected its report in {self._path}.")
        report = json.loads(self._path.read_text(encoding="utf-8"))
        self._rows, self._ratios = report["rows"], report["ratios"]

    @property
    def count(self) -> str:
        """Number of runs of each row, in words."""
        return _counted({len(row["runs"]) for row in self._rows}, "run")

    def cases(self, unit: str) -> list[str]:
        """Return the cases that were measured in a unit, in their order."""
        return list(dict.fromkeys(row["case"] for row in self._rows if row["unit"] == unit))

    def peers(self, unit: str) -> list[str]:
        """Return the peers that were measured in a unit, in their order."""
        return list(dict.fromkeys(row["peer"] for row in self._rows if row["unit"] == unit))

    def ratio(self, name: str) -> float:
        """Return a ratio of the report.

        Raises:
            NotMeasured: the report has no such ratio.
        """
        if self._ratios.get(name) is None:
            raise NotMeasured(f"{self._path.name}: expected a ratio {name!r}.")
        return float(self._ratios[name])

    def value(self, case: str, peer: str, unit: str) -> float:
        """Return the median of a row's runs.

        Raises:
            NotMeasured: the report has no such row.
        """
        for row in self._rows:
            if (row["case"], row["peer"], row["unit"]) == (case, peer, unit) and row["value"] is not None:
                return float(row["value"])
        raise NotMeasured(f"{self._path.name}: expected a row {case!r}, {peer!r} in {unit}.")


def _counted(counts: set[int], unit: str) -> str:
    least, most = min(counts), max(counts)
    return f"{least if least == most else f'{least} to {most}'} {unit}{'' if most == 1 else 's'}"


def is_trained(command: str) -> bool:
    """Return whether a command trains on simulated clusters."""
    return command.startswith(TRAINED)


def plan_of_command(command: str) -> Plan:
    """Return the trainings of a command of the benchmark ``convergence``."""
    return plan_of(options_of(shlex.split(command.removeprefix(TRAINED))))


def _belongs(result: Result, plan: Plan) -> bool:
    own = result.training
    return own in trainings(plan, setting_of(plan, plan.task, plan.samples or own.setting.samples))


@dataclass(frozen=True)
class Verdict:
    """Our figure for a claim.

    Attributes:
        figure: The figure with its peers.
        confirmed: Whether it is what the publication claims.
    """

    figure: str
    confirmed: bool


@dataclass(frozen=True)
class Claim:
    """A claim of a publication.

    Attributes:
        text: The claim.
        theirs: The published figure.
        command: Arguments of ``scripts/bench`` that measure it.
        workload: What is trained, in words.
        find: Judges the trainings of the command, :class:`CommandResults`, or its report, :class:`ReportFigures`.
    """

    text: str
    theirs: str
    command: str
    workload: str
    find: Callable[[Any], Verdict]

    def judged(self, results: Iterable[Result]) -> tuple[str, str]:
        """Return our figure, with its number of seeds or runs, and the verdict."""
        try:
            trained = CommandResults(self.command, results) if is_trained(self.command) else ReportFigures(self.command)
            found = self.find(trained)
        except NotMeasured:
            return "", "not measured yet"
        return f"{found.figure} ({trained.count})", "**confirmed**" if found.confirmed else "**not confirmed**"


def table(claims: Sequence[Claim], results: Sequence[Result]) -> str:
    """Return a table of the claims of one publication, and their commands."""
    commands = list(dict.fromkeys(claim.command for claim in claims))
    lines = ["| claim | theirs | our workload | our figure | verdict | command |", "|---|---|---|---|---|---|"]
    for claim in claims:
        figure, verdict = claim.judged(results)
        cells = (claim.text, claim.theirs, claim.workload, figure, verdict, str(1 + commands.index(claim.command)))
        lines.append(f"| {' | '.join(cells)} |")
    shown = [f"./scripts/bench {command}  # {number}" for number, command in enumerate(commands, start=1)]
    return "\n".join([*lines, "", "```bash", *shown, "```"])
