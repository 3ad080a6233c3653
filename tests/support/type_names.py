"""Type names of the project and their meanings; ``python -m tests.support.type_names`` writes those with several."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "nfdt", ROOT / "hfdt", ROOT / "client" / "nfdt_client")
TABLE = ROOT / "tests" / "data" / "type_names.json"

# Names that are meant to have several meanings, with the reason.
MEANT: dict[str, str] = {
    "Array": "array of NumPy, or of the library that carries out an update rule",
    "Vector": "vector of NumPy, or of the library that carries out an update rule",
}


def meanings_in(source: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield each type name of a file, without underscores, and its meaning.

    The meaning of a class is itself; that of an alias is its value, so that equal aliases of several files are one.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), f"{file}:{node.name}"
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lstrip("_")
            if name[:1].isupper() and not name.isupper() and any(letter.islower() for letter in name):
                yield name, ast.unparse(node.value)


def meanings(files: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the meanings of each type name over files, given as sources by name."""
    found: dict[str, set[str]] = {}
    for file, source in files.items():
        for name, meaning in meanings_in(source, file):
            found.setdefault(name, set()).add(meaning)
    return found


def project_files() -> dict[str, str]:
    """Return all sources of the project; generated files are left out."""
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py")) if "_pb2" not in path.name]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def ambiguous(files: Mapping[str, str]) -> dict[str, int]:
    """Return the number of meanings of each name with several."""
    return {name: len(found) for name, found in sorted(meanings(files).items()) if len(found) > 1}


def unmeant(files: Mapping[str, str]) -> dict[str, int]:
    """Return the result of :func:`ambiguous` without the names that are meant to be ambiguous."""
    return {name: count for name, count in ambiguous(files).items() if name not in MEANT}


def main() -> None:
    """Write the table of names that are still to be renamed."""
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(unmeant(project_files()), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
