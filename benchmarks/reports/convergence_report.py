"""Tables of the results of one or several runs of `convergence`, and a picture if matplotlib is installed."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads.convergence_rows import SEQUENTIAL
from nfdt.simulate.plots import COLOURS, LINES, MARKERS


@dataclass(frozen=True)
class Case:
    """One training configuration.

    Attributes:
        row: Row of the benchmark.
        workers: Number of workers.
        speeds: ``equal`` or ``unequal``.
        rate: Learning rate, and the momentum if it is not the default, as in ``0.1,momentum=0``.
    """

    row: str
    workers: int
    speeds: str
    rate: str


Runs = Mapping[Case, Mapping[str, Sequence[float]]]
"""Results of each case: one number per seed, by unit."""


def read(files: Sequence[Path]) -> Runs:
    """Read JSON files; if several contain a case, the last one counts."""
    found: dict[Case, dict[str, list[float]]] = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            _, workers, speeds, rate = row["case"].split()
            case = Case(row["peer"], int(workers[2:]), speeds, rate[3:])
            found.setdefault(case, {})[row["unit"]] = [math.inf if v is None else v for v in row["runs"]]
    return found


def accuracy(runs: Runs, case: Case) -> tuple[float, float]:
    """Return mean and standard deviation of the accuracy in %."""
    values = runs[case]["% test accuracy"]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def best(runs: Runs, row: str, workers: int, speeds: str) -> Case | None:
    """Return the case with a row's best rate, among those with the default momentum."""
    cases = [c for c in runs if (c.row, c.workers, c.speeds) == (row, workers, speeds) and "momentum" not in c.rate]
    return max(cases, key=lambda case: accuracy(runs, case)[0], default=None)


def _ordered(values: Iterator[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def table(runs: Runs, rate: str | None) -> str:
    """Return a Markdown table of rows by clusters at one rate; None: each row at its best rate, which is shown."""
    cases = [case for case in runs if case.row != SEQUENTIAL and (rate in (None, case.rate))]
    clusters = sorted({(case.workers, case.speeds) for case in cases})
    lines = ["| row | " + " | ".join(f"{workers} {speeds}" for workers, speeds in clusters) + " |"]
    lines.append("|---" * (len(clusters) + 1) + "|")
    for row in _ordered(case.row for case in cases):
        cells = []
        for workers, speeds in clusters:
            case = best(runs, row, workers, speeds) if rate is None else Case(row, workers, speeds, rate)
            if case is None or case not in runs:
                cells.append("")
                continue
            mean, deviation = accuracy(runs, case)
            cells.append(f"{mean:.1f} ± {deviation:.1f}" + (f" ({case.rate})" if rate is None else ""))
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(runs: Runs, path: Path) -> None:
    """Write a PNG of the accuracy at each row's best rate against the number of workers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    rows = _ordered(case.row for case in runs if case.row != SEQUENTIAL)
    for axes, speeds in zip(figure.subplots(1, 2, sharey=True), ("equal", "unequal"), strict=True):
        if (alone := best(runs, SEQUENTIAL, 1, "equal")) is not None:
            axes.axhline(accuracy(runs, alone)[0], color="#555555", linewidth=1, label="one machine")
        for index, row in enumerate(rows):
            cases = [best(runs, row, workers, speeds) for workers in sorted({case.workers for case in runs})]
            points = [(case.workers, *accuracy(runs, case)) for case in cases if case is not None]
            if points:
                style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index // len(COLOURS) % len(LINES)]}
                x, y, deviations = zip(*points, strict=True)
                axes.errorbar(x, y, deviations, marker=MARKERS[index % len(MARKERS)], capsize=3, label=row, **style)
        axes.set(title=f"{speeds} speeds", xlabel="workers", xscale="log")
        axes.set_xticks(ticks := sorted({case.workers for case in runs if case.workers > 1}), map(str, ticks))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="test accuracy (%), best rate, mean ± std")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of `scripts/bench convergence`")
    parser.add_argument("--png", type=Path, help="write a picture")
    options = parser.parse_args()
    runs = read(options.files)
    for case in runs:
        if case.row == SEQUENTIAL:
            print(f"sequential, lr {case.rate}: {accuracy(runs, case)[0]:.1f} ± {accuracy(runs, case)[1]:.1f}")
    for rate in _ordered(case.rate for case in runs):
        print(f"\nlr {rate}\n\n{table(runs, rate)}")
    print(f"\nbest rate of each\n\n{table(runs, None)}")
    if options.png:
        plot(runs, options.png)


if __name__ == "__main__":
    main()
