"""Features that tests prove, as marks of the tests, and the page that lists them: ``docs/what_works.md``.

A test has ``@pytest.mark.feature("Lion", "Nadam", area="Optimizers")``; ``status`` and ``note`` are optional. Marks are
read from the source texts, without an import of the tests. ``scripts/features`` writes the page.
The table of libraries is that of the last runs of ``scripts/conformance libraries``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.conformance import library_suite

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "what_works.md"
MARK = "pytest.mark.feature"

AREAS = (
    *("Models", "Losses and metrics", "Optimizers", "Data", "Fit, evaluate and predict", "Callbacks", "Detached jobs"),
    *("Algorithms", "Launchers and environments", "Failures"),
)
STATUSES = ("works", "refused", "not yet")

HEAD = """# What works

Each line is proved by a test, which carries it as a mark; `scripts/features` writes this page from the marks.
*Refused* means an error that names the reason and the remedy, before anything is trained.
*Not yet* means that a later version may do it; this one refuses it.
Keras' own tests of `fit` run on workers too: [each with its result](keras_tests.md).
"""


@dataclass(frozen=True)
class Feature:
    """A feature as one test proves it."""

    area: str
    name: str
    status: str
    note: str
    path: Path
    test: str

    @property
    def proof(self) -> str:
        """Link to the test, with its name as a sentence."""
        sentence = self.test.removeprefix("test_").replace("_", " ")
        return f"[{sentence}](../{self.path.as_posix()})"


def read(path: Path, source: str) -> Iterator[Feature]:
    """Yield the features in the marks of a test file.

    Args:
        path: The file, relative to the repository.
        source: Its text.

    Raises:
        ValueError: A mark has an unknown area, status or argument.
    """
    for node in ast.walk(ast.parse(source)):
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                assert isinstance(node, ast.FunctionDef)
                names = [ast.literal_eval(argument) for argument in mark.args]
                options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in mark.keywords}
                yield from _features(names, options, path, node.name)


def _features(names: list[str], options: dict[str, str], path: Path, test: str) -> Iterator[Feature]:
    area, status, note = options.pop("area", ""), options.pop("status", "works"), options.pop("note", "")
    if not names or options or area not in AREAS or status not in STATUSES:
        raise ValueError(
            f"{path}::{test}: expected feature(NAME, ..., area=one of {AREAS}, status=one of {STATUSES}, note=TEXT). "
            f"Received: {names}, area={area!r}, status={status!r}, {options}."
        )
    for name in names:
        yield Feature(area, name, status, note, path, test)


def page(features: Iterable[Feature]) -> str:
    """Return the page: a table for each area, a line for each feature.

    Raises:
        ValueError: Tests do not agree on the status of a feature.
    """
    found: dict[str, dict[str, list[Feature]]] = {area: {} for area in AREAS}
    for feature in sorted(features, key=lambda one: (one.name.lower(), one.path, one.test)):
        found[feature.area].setdefault(feature.name, []).append(feature)
    parts = [HEAD]
    for area, rows in found.items():
        if rows:
            lines = [_line(name, proofs) for name, proofs in rows.items()]
            parts.append("\n".join([f"## {area}\n", "| feature | status | proof |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def _line(name: str, proofs: list[Feature]) -> str:
    statuses = {proof.status for proof in proofs}
    if len(statuses) > 1:
        raise ValueError(f"{name}: expected one status. Received: {sorted(statuses)}, from {proofs}.")
    notes = dict.fromkeys(proof.note for proof in proofs if proof.note)
    status = ": ".join([*statuses, *filter(None, ["; ".join(notes)])])
    return f"| {name} | {status} | {'; '.join(proof.proof for proof in proofs)} |"


def all_features() -> list[Feature]:
    """Return the features of all tests."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("test_*.py"))}
    marked = {path.relative_to(ROOT): source for path, source in sources.items() if MARK in source}
    return [feature for path, source in marked.items() for feature in read(path, source)]


def whole_page() -> str:
    """Return the page with the features of all tests, and the libraries that ``scripts/conformance`` has run."""
    return f"{page(all_features())}\n{library_suite.section()}"


def main() -> None:
    """Write the page."""
    text = whole_page()
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {text.count('](../tests/')} proofs", file=sys.stderr)


if __name__ == "__main__":
    main()
