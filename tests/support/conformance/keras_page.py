"""Rows of Keras' own tests in a file, and the page that is written from them: ``docs/keras_tests.md``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from nfdt.core.host import machine
from tests.support.conformance.keras_reasons import reason_to_differ
from tests.support.conformance.keras_suite import Configuration, suite_of
from tests.support.conformance.verdicts import Outcome, Row, verdict

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "keras_tests.md"
RECORD = Path(__file__).with_name("keras_tests.jsonl")
SIGNS = {"pass": "✓", "refused": "R", "differs": "D", "wrong": "**W**", "not comparable": "–"}

HEAD = """# Keras' own tests

The package of Keras contains its tests.
These are all of its tests that call `fit`, found in their source: {tests} with their parameters, in {files} files.
Each runs plain, and then with its fits distributed, on {versions}.

```bash
./scripts/conformance keras --record
./scripts/conformance keras --record --algorithm bsp --workers 1 --hooks exact
./scripts/conformance keras --algorithm ddc-asgd --workers 2 --hooks auto -k csv_logger callbacks
```

- The first command runs all configurations and writes this page, after each of them.
- The second runs one of them; rows of the others stay as they are, and tests that ran plain are not run plain again.
- The third runs some tests and only prints.

In the tables below:

- A column is a configuration: the algorithm, the number of workers, and [`batch_hooks`](how_it_works.md#batch-hooks).
- ✓: the test passes, and at least one fit was distributed.
- R: NFDT refuses the fit with an error that names the reason and the remedy, before anything is trained.
- D: the test fails, for the reason given, which is a known difference.
- **W**: the test fails for no known reason.
- –: not comparable, as the test does not pass plain here, or distributes no fit.

## Counts

"""
COUNTS = "| algorithm | workers | `batch_hooks` | comparable | pass | refused | differ | wrong |\n" + 8 * "|---" + "|\n"


@dataclass
class Record:
    """Rows of the configurations.

    Attributes:
        versions: Versions of what the tests ran on, by name.
        plain: Outcome of each test that runs plain: why it is not comparable; "": it passes.
        rows: Verdict and error line of each test, by the title of a configuration.
    """

    versions: dict[str, str]
    plain: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RECORD) -> Record:
        """Return the record in a file."""
        first, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        record = cls(first)
        for line in lines:
            test, record.plain[test] = line.pop("test"), line.pop("plain")
            for title, row in line.items():
                record.rows.setdefault(title, {})[test] = tuple(row)
        return record

    def write(self, path: Path = RECORD) -> None:
        """Write the record: a line with the versions, and one for each test."""
        lines: list[dict[str, Any]] = [self.versions]
        for test in sorted(self.plain):
            rows = {title: rows[test] for title, rows in sorted(self.rows.items()) if test in rows}
            lines.append({"test": test, "plain": self.plain[test], **rows})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def add_plain(self, outcomes: Mapping[str, Outcome]) -> None:
        """Add the outcomes of tests that ran plain."""
        self.plain |= {test: "" if one.passed else one.line or "skipped" for test, one in outcomes.items()}

    def judge(
        self, configuration: Configuration, outcomes: Mapping[str, Outcome], suites: tuple[str, ...]
    ) -> list[Row]:
        """Return the rows of a configuration, and take them in place of earlier ones of the same suites."""
        tests = {test: line for test, line in self.plain.items() if suite_of(test) in suites}
        rows = [verdict(test, Outcome(not line, line=line), outcomes.get(test)) for test, line in tests.items()]
        kept = self.rows.setdefault(str(configuration), {})
        kept |= {row.name: (row.verdict, row.line) for row in rows}
        return rows


def versions() -> dict[str, str]:
    """Return the versions of what the tests run on here, by name."""
    found = machine.versions()
    return {name: found[name.lower()] for name in ("Python", "Keras", "TensorFlow")}


def page(record: Record) -> str:
    """Return the page."""
    columns = {title: judged(title, rows) for title, rows in sorted(record.rows.items())}
    files = {test.partition("::")[0] for test in record.plain}
    named = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    head = HEAD.format(tests=len(record.plain), files=len(files), versions=named)
    counts = "".join(_count(title, Counter(sign for sign, _ in column.values())) for title, column in columns.items())
    return head + COUNTS + counts + "".join(_tables(sorted(record.plain), columns))


def judged(title: str, rows: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return verdicts and reasons of a configuration; what is wrong for a known reason "differs"."""
    known = {test: reason_to_differ(title, test, line) for test, (found, line) in rows.items() if found == "wrong"}
    return {test: ("differs", known[test]) if known.get(test) else tuple(row) for test, row in rows.items()}  # type: ignore[misc]


def _count(title: str, found: Counter[str]) -> str:
    algorithm, workers, hooks = title.split(", ")
    comparable = found.total() - found["not comparable"]
    numbers = [comparable, *(found[name] for name in ("pass", "refused", "differs", "wrong"))]
    return f"| `{algorithm}` | {workers} | {hooks} | {' | '.join(map(str, numbers))} |\n"


def _tables(tests: list[str], columns: Mapping[str, Mapping[str, tuple[str, str]]]) -> Iterator[str]:
    """Yield a table for each file, with a line for each of its tests."""
    titles = " | ".join(title.replace(", ", "<br>") for title in columns)
    for file, group in groupby(tests, key=lambda test: test.partition("::")[0]):
        yield (
            f"\n## {file.removeprefix('src/')}\n\n| test | {titles} | reason |\n" + "|---" * (len(columns) + 2) + "|\n"
        )
        for test in group:
            found = [column.get(test, ("not comparable", "not run")) for column in columns.values()]
            reasons = dict.fromkeys(reason for name, reason in found if name != "pass")
            signs = " | ".join(SIGNS[name] for name, _ in found)
            shown = test.rpartition("::")[2].replace("|", "\\|")
            yield f"| `{shown}` | {signs} | {_escaped('; '.join(reasons))} |\n"


def _escaped(text: str) -> str:
    for character in "\\|<>*_`[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
