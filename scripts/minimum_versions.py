"""Minimum versions of the dependencies, the advisories that they answer, and the versions of this environment."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import setuptools  # noqa: F401  # Python 3.12 has no distutils but this
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from distutils.core import run_setup  # isort: skip

ROOT = Path(__file__).resolve().parents[1]
ADVISORIES = Path(__file__).with_name("advisories.toml")
LOOK_AGAIN = timedelta(days=182)


@dataclass(frozen=True)
class Advisory:
    """Published fault of a package; ``fixed``: the first version without it."""

    name: str
    fixed: Version
    effect: str


@dataclass(frozen=True)
class Accepted:
    """Published fault that no release corrects; ``until``: the last day on which it is accepted for this reason."""

    name: str
    package: str
    reason: str
    until: date

    def problems(self, today: date) -> list[str]:
        """Return what has to be done about it, once its time is over."""
        if today <= self.until:
            return []
        return [
            f"{self.package}: {self.name} was accepted until {self.until}. Expected: a decision. Received: none by "
            f"{today}. Look for a release without it; if there is none and the reason holds, move the date in "
            "advisories.toml."
        ]


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


@dataclass(frozen=True)
class Advisories:
    """All known advisories.

    Attributes:
        looked: Day of the last look for new ones.
        accepted: Those that no release corrects.
        fixed: Those with a fix, by package, oldest fix first.
    """

    looked: date
    accepted: tuple[Accepted, ...]
    fixed: Mapping[str, tuple[Advisory, ...]]

    @classmethod
    def read(cls, file: Path) -> Advisories:
        """Return those in a file."""
        tables = tomllib.loads(file.read_text())
        accepted = tuple(Accepted(name, **fields) for name, fields in tables.pop("accepted").items())
        looked = tables.pop("looked")
        fixed = {
            package: tuple(Advisory(name, Version(fixed), effect) for name, (fixed, effect) in table.items())
            for package, table in tables.items()
        }
        return cls(looked, accepted, fixed)

    def problems(self, today: date) -> list[str]:
        """Return which dates are over."""
        found = [problem for one in self.accepted for problem in one.problems(today)]
        if today > self.looked + LOOK_AGAIN:
            found.append(
                f"advisories.toml: expected a look for new advisories within {LOOK_AGAIN.days} days. Received: one of "
                f"{self.looked}. Look up all dependencies, add what is new, and set the date."
            )
        return found

    def lines(self) -> list[str]:
        """Return the lines of the list."""
        first = f"advisories of {self.looked}, accepted without a fix:"
        return [first, *(f"    {a.name} of {a.package} until {a.until}: {a.reason}" for a in self.accepted)]


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


def main(today: date | None = None) -> int:
    """Print the list and the problems; return 1 if there are any."""
    known = Advisories.read(ADVISORIES)
    found = dependencies(declared(ROOT), known.fixed)
    print("\n".join([*(line for one in found for line in one.lines()), *known.lines()]))
    problems = [*(problem for one in found for problem in one.problems()), *known.problems(today or date.today())]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
