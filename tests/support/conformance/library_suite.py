"""Scripts that train with libraries on Keras, plain and with workers, and the table that is written from them.

Weights are random and data are made: nothing is downloaded.
On one worker the fits must equal the plain ones; on several they train other weights, and must come close.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.conformance import fit_difference, script_suite
from tests.support.conformance.verdicts import Outcome, Row, verdict

FOLDER = Path(__file__).parent / "libraries"
RECORD = Path(__file__).with_suffix(".json")
ALGORITHMS = {1: ["--algorithm", "bsp"], 2: []}
EXACT = fit_difference.Tolerance(relative=1e-3, absolute=1e-4)
DEADLINE_S = 600.0

HEAD = """## Libraries

`scripts/conformance libraries` runs scripts that use libraries on Keras, and writes this table.
Weights are random and data are made.
*pass* on one worker, with `bsp`: each value of each history equals that of plain Keras, up to rounding.
*pass* on two workers, with the default algorithm: the losses come close to those of plain Keras.
The versions:

{versions}

| script | libraries | 1 worker | 2 workers |
|---|---|---|---|
"""


def scripts(names: Iterable[str] = ()) -> list[Path]:
    """Return the scripts of these names; all without names."""
    chosen = set(names)
    return [path for path in sorted(FOLDER.glob("*.py")) if not chosen or path.stem in chosen]


def run(script: Path) -> Iterator[tuple[int, Row]]:
    """Run a script plain and with each number of workers; yield the numbers and the verdicts."""
    plain = script_suite.run_script([sys.executable], script, DEADLINE_S)
    for workers, options in ALGORITHMS.items():
        if not plain.outcome.passed:
            yield workers, verdict(script.stem, plain.outcome, None)
            continue
        command = [sys.executable, "-m", "nfdt.cli", "run", "--workers", str(workers), *options]
        distributed = script_suite.run_script(command, script, DEADLINE_S)
        yield workers, verdict(script.stem, plain.outcome, judged(plain, distributed, workers))


def judged(plain: script_suite.Run, distributed: script_suite.Run, workers: int) -> Outcome:
    """Return the outcome of a distributed run; on one worker every value must equal that of the plain run."""
    outcome = script_suite.judged(plain, distributed, workers)
    text = fit_difference.difference(plain.fits, distributed.fits, EXACT) if workers == 1 and outcome.passed else ""
    return Outcome(False, line=text) if text else outcome


def libraries(script: Path) -> list[str]:
    """Return the distributions of the libraries that a script imports, without those that every script has."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules = {name.partition(".")[0] for name in names} - {"keras", "numpy", *sys.stdlib_module_names}
    owners = metadata.packages_distributions()
    return sorted({owners[module][0] for module in modules if module in owners})


def read_record() -> dict[str, Any]:
    """Return the rows of former runs by the names of their scripts, and the versions."""
    if RECORD.exists():
        return dict(json.loads(RECORD.read_text(encoding="utf-8")))
    return {"versions": {}, "rows": {}}


def add_to_record(script: Path, rows: dict[int, Row], versions: dict[str, str]) -> None:
    """Keep the rows of a script, in place of those of former runs."""
    record = read_record()
    used = libraries(script)
    title = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.stem).splitlines()[0]
    verdicts = {str(workers): [row.verdict, row.line] for workers, row in rows.items()}
    record["rows"][script.stem] = {"title": title, "libraries": used, "verdicts": verdicts}
    record["versions"] |= {**versions, **{name: metadata.version(name) for name in used}}
    record["rows"] = {path.stem: record["rows"][path.stem] for path in scripts() if path.stem in record["rows"]}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def section() -> str:
    """Return the table for the page of features; it is written from the record."""
    record = read_record()
    versions = "\n".join(f"- {name} {version}" for name, version in sorted(record["versions"].items()))
    lines = [
        f"| [{row['title'].rstrip('.')}](../{(FOLDER / name).relative_to(Path(__file__).parents[3])}.py) "
        f"| {', '.join(row['libraries']) or '–'} | {_cell(row, '1')} | {_cell(row, '2')} |"
        for name, row in sorted(record["rows"].items())
    ]
    return HEAD.format(versions=versions) + "\n".join(lines) + "\n"


def _cell(row: dict[str, Any], workers: str) -> str:
    found, line = row["verdicts"].get(workers, ["not run", ""])
    return found if found == "pass" else f"{found}: {line.replace('|', '/')}"
