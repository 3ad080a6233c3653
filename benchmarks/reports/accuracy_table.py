"""The data file of the planner's expected accuracy losses, generated from the tables of docs/convergence.md."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.workloads.convergence_rows import ROWS
from nfdt.core.specs.job import resolve_algorithm
from nfdt.planning.accuracy import MeasuredTraining, measured_as

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "convergence.md"
DATA_FILE = ROOT / "nfdt" / "planning" / "data" / "accuracy.json"

AT_ONE_MACHINES_RATE = "At the learning rate of the single machine"
AT_LOWER_RATES = "At lower learning rates"
UNEQUAL_MACHINES = "In virtual time"  # the last table of this section: 8 unequal workers at three rates
CIFAR = "CIFAR-10"
CHANCE = 11.0  # % for ten classes; a row diverges at a rate if one of its clusters is not above it

Figures = dict[str, dict[int, float]]  # % by the planner's name of a row and by number of workers


@dataclass(frozen=True)
class PublishedTable:
    """One table of the document.

    Attributes:
        lead: Text between the previous table and this one, within a section.
        header: Cells of the first line.
        lines: Cells of the other lines.
    """

    lead: str
    header: list[str]
    lines: Sequence[Sequence[str]]

    @property
    def rate(self) -> float:
        """Learning rate in the text before the table."""
        return float(re.findall(r"\blr (0\.\d+)", self.lead)[-1])

    @property
    def one_machine(self) -> float:
        """Accuracy of one machine in the text before the table."""
        return float(re.findall(r"one machine:? (\d+\.\d+)", self.lead)[0])

    def by_column(self) -> list[Mapping[str, str]]:
        """Return the lines, each by column."""
        return [dict(zip(self.header, line, strict=True)) for line in self.lines]

    def figures(self) -> Figures:
        """Return the accuracies of equal workers, from columns such as ``8 equal``."""
        found: Figures = {}
        for line in self.by_column():
            for column, cell in line.items():
                size, accuracy = re.fullmatch(r"(\d+) equal", column), re.match(r"\**(\d+\.\d+)", cell)
                if size and accuracy:
                    found.setdefault(planner_name(line[self.header[0]]), {})[int(size[1])] = float(accuracy[1])
        return found

    def keep(self, column: str, value: str) -> PublishedTable:
        """Return the table with only the lines whose cell in a column begins with a value."""
        index = self.header.index(column)
        return replace(self, lines=[line for line in self.lines if line[index].startswith(value)])

    def figure(self, column: str) -> float:
        """Return the accuracy in a column of the first line."""
        return float(self.by_column()[0][column].split()[0])


def read_tables(document: str) -> dict[str, list[PublishedTable]]:
    """Return the tables of a Markdown document by section."""
    found: dict[str, list[PublishedTable]] = {}
    for section in re.split(r"^## ", document, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        parts = re.split(r"((?:^\|.*\n)+)", text, flags=re.MULTILINE)
        for lead, table in zip(parts[::2], parts[1::2], strict=False):
            header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
            found.setdefault(title, []).append(PublishedTable(lead, header, lines))
    return found


def planner_name(cell: str) -> str:
    """Return the planner's name of a row from the first cell of its line, such as ```bsp` (synchronous)``."""
    preset, overrides = ROWS[re.findall(r"`([\w-]+)`", cell)[0]]
    return measured_as(resolve_algorithm(preset, **overrides))


def read_trainings(document: str) -> list[MeasuredTraining]:
    """Return the trainings used by the planner."""
    tables = read_tables(document)
    short, long = tables[AT_ONE_MACHINES_RATE]
    lower = {round(short.rate / table.rate): table.figures() for table in tables[AT_LOWER_RATES]}
    cifar = tables[CIFAR][0]
    return [
        _short_training(short, tables[UNEQUAL_MACHINES][-1], lower),
        MeasuredTraining("the same, 7,035 updates", long.figure("one machine"), long.figures()),
        MeasuredTraining(
            "CIFAR-10, a CNN, 1,173 updates", cifar.one_machine, cifar.keep("lr", f"{short.rate:g}").figures()
        ),
    ]


def _short_training(table: PublishedTable, unequal: PublishedTable, lower: Mapping[int, Figures]) -> MeasuredTraining:
    """Return the short training; rows that merge some workers' gradients were only measured on 8 unequal workers."""
    figures = table.figures()
    diverged = {row for row, found in figures.items() if min(found.values()) < CHANCE}
    rows = {row: dict.fromkeys(found) if row in diverged else found for row, found in figures.items()}
    for line in ("n-softsync", "group-sync"):
        rows[planner_name(f"`{line}`")] = {8: unequal.keep("row", f"`{line}`").figure(f"lr {table.rate:g}")}
    return MeasuredTraining(
        "Fashion-MNIST, an MLP, 1,407 updates",
        table.one_machine,
        rows,
        {row: _best(row, lower) for row in figures if row in diverged},
    )


def _best(row: str, lower: Mapping[int, Figures]) -> dict[int, tuple[int, float]]:
    """Return the divisor with a row's best accuracy, and that accuracy, by number of workers."""
    found: dict[int, tuple[int, float]] = {}
    for divisor, figures in lower.items():
        for workers, accuracy in figures.get(row, {}).items():
            if workers not in found or accuracy > found[workers][1]:
                found[workers] = divisor, accuracy
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", default=DATA_FILE, help="file to write")
    options = parser.parse_args()
    trainings = [training.to_json() for training in read_trainings(DOCUMENT.read_text(encoding="utf-8"))]
    options.json.write_text(json.dumps(trainings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
