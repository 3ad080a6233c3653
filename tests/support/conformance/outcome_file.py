"""File with a line for each outcome of a test, which a plugin of pytest writes and a suite reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.conformance.verdicts import Outcome

REFUSALS = frozenset(f"nfdt.core.errors.{name}" for name in ("UsageError", "CaptureError", "PolicyRefused"))
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_INSTALLATION = re.compile(r"[^\s'\"]*/site-packages/")
COLLECTED = "no outcome: the process ended before"


def write_collected(path: Path, tests: Iterable[str]) -> None:
    """Write a line for each test, which stays its outcome if the process ends before the test does."""
    for test in tests:
        _append(path, {"test": test, "outcome": "collected", "line": COLLECTED})


def write_outcome(path: Path, report: pytest.TestReport | pytest.CollectReport, fits: int | None = None) -> None:
    """Write what a test's report adds: failures and skips of any phase, and calls that pass."""
    if report.when != "call" and report.passed:
        return
    line = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        line = _first_line(str(crash.message if crash else report.longrepr))
    elif report.skipped and isinstance(report.longrepr, tuple):
        line = report.longrepr[2].removeprefix("Skipped: ")
    line = _INSTALLATION.sub("", line)  # the same on every machine
    found = {"test": report.nodeid, "outcome": report.outcome, "line": line[:300]}
    _append(path, {**found, "fits": fits})


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the last outcome of each test."""
    return {line["test"]: _outcome(line) for line in map(json.loads, path.read_text().splitlines())}


def _first_line(message: str) -> str:
    """Return the first line of an error, and the last one if Keras has put a traceback between them.

    Of a file that cannot be imported it is the line of the error in the traceback. Addresses are left out.
    """
    first, *rest = message.strip().splitlines()
    if raised := [line for line in rest if line.startswith("E  ")]:
        first = raised[0][1:].strip()
    elif rest and first.endswith("in user code:"):
        first = f"{first} {rest[-1].strip()}"
    return ADDRESS.sub("0x...", first)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _outcome(line: dict[str, Any]) -> Outcome:
    return Outcome(
        passed=line["outcome"] == "passed",
        skipped=line["outcome"] == "skipped",
        refused=line["line"].partition(":")[0] in REFUSALS,
        line=line["line"],
        fits=line.get("fits"),
    )
