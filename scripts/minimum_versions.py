"""Minimum versions of the dependencies, the advisories that they answer, and the versions of this environment."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import setuptools  # noqa: F401  # Python 3.12 has no distutils but this
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from distutils.core import run_setup  # isort: skip

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Advisory:
    """Published fault of a package; ``fixed``: the first version without it."""

    name: str
    fixed: Version
    effect: str


@dataclass(frozen=True)
class Dependency:
    """Package with its minimum and installed version; None where there is none."""

    name: str
    minimum: Version | None
    installed: Version | None
    advisories: tuple[Advisory, ...]

    def problems(self) -> list[str]:
        """Return what is wrong with the versions, with a remedy."""
        found = []
        if self.installed and self.minimum and self.installed < self.minimum:
            found.append(
                f"{self.name}: expected {self.minimum} or newer. Received: {self.installed}. "
                f"Run: pip install '{self.name}>={self.minimum}'"
            )
        last = max(self.advisories, key=lambda one: one.fixed, default=None)
        if last and (self.minimum is None or self.minimum < last.fixed):
            found.append(
                f"{self.name}: expected a minimum of {last.fixed} or newer, because of {last.name}. "
                f"Received: {self.minimum or 'none'}. Raise it in setup.py or pyproject.toml."
            )
        return found

    def lines(self) -> list[str]:
        """Return the lines of the list."""
        first = f"{self.name:24} {f'>={self.minimum}' if self.minimum else 'any':12} installed: {self.installed or '-'}"
        return [first, *(f"    {a.name} (fixed in {a.fixed}): {a.effect}" for a in self.advisories)]


def declared(root: Path) -> dict[str, Version | None]:
    """Return the highest minimum of each package that ``setup.py`` and ``pyproject.toml`` name."""
    package = run_setup(str(root / "setup.py"), stop_after="init")
    build = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    found: dict[str, Version | None] = {}
    for text in chain(package.install_requires, *package.extras_require.values(), build):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        minimums = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
        found[name] = max([*minimums, *filter(None, [found.get(name)])], default=None)
    return found


def published(file: Path) -> dict[str, tuple[Advisory, ...]]:
    """Return the advisories about each package, oldest fix first."""
    tables = tomllib.loads(file.read_text())
    return {
        package: tuple(Advisory(name, Version(fixed), effect) for name, (fixed, effect) in table.items())
        for package, table in tables.items()
    }


def _installed(name: str) -> Version | None:
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def dependencies(
    minimums: Mapping[str, Version | None], advisories: Mapping[str, tuple[Advisory, ...]]
) -> list[Dependency]:
    """Return all dependencies by name, with the versions of this environment."""
    return [Dependency(name, minimums[name], _installed(name), advisories.get(name, ())) for name in sorted(minimums)]


def main() -> int:
    """Print the list and the problems; return 1 if there are any."""
    found = dependencies(declared(ROOT), published(Path(__file__).with_name("advisories.toml")))
    print("\n".join(line for one in found for line in one.lines()))
    problems = [problem for one in found for problem in one.problems()]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
