"""Outcomes of a suite, plain and distributed, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["pass", "refused", "wrong", "not comparable"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test or a script.

    Attributes:
        passed: Whether it passed.
        skipped: Whether it was not run.
        refused: Whether it ended with a message that the script cannot be distributed.
        line: First line of the error.
        fits: Number of fits that were distributed; None: not counted.
    """

    passed: bool
    skipped: bool = False
    refused: bool = False
    line: str = ""
    fits: int | None = None


@dataclass(frozen=True)
class Row:
    """One test or script: its verdict, and the error that explains it."""

    name: str
    verdict: Verdict
    line: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def verdict(name: str, plain: Outcome, distributed: Outcome | None) -> Row:
    """Judge a distributed run by the plain one; without a pass there, or a fit here, it is not comparable."""
    if plain.skipped or not plain.passed:
        return Row(name, "not comparable", plain.line or "skipped")
    if distributed is None:
        return Row(name, "wrong", "no outcome: the process ended before")
    if distributed.passed:
        return Row(name, "not comparable", "no fit is distributed") if distributed.fits == 0 else Row(name, "pass")
    return Row(name, "refused" if distributed.refused else "wrong", distributed.line)


def judge(plain: Mapping[str, Outcome], distributed: Mapping[str, Outcome]) -> list[Row]:
    """Return a row for each plain outcome."""
    return [verdict(name, outcome, distributed.get(name)) for name, outcome in plain.items()]


def table(title: str, rows: Iterable[Row]) -> str:
    """Return a line of counts, and a line for each row that does not pass."""
    rows = list(rows)
    counts = Counter(row.verdict for row in rows)
    comparable = len(rows) - counts["not comparable"]
    first = f"{title}: {counts['pass']} of {comparable} pass, {counts['refused']} refused, {counts['wrong']} wrong"
    if counts["not comparable"]:
        first += f"; {counts['not comparable']} not comparable"
    return "\n".join([first, *(f"  {row.verdict:14} {row.name}: {row.line}" for row in rows if row.verdict != "pass")])
