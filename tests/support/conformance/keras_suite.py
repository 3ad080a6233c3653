"""Keras' own tests that call ``fit``, from the installed package, plain and in each configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.support.conformance.fit_calls import find_fitting_tests
from tests.support.conformance.outcome_file import read_outcomes
from tests.support.conformance.verdicts import Outcome

PLUGIN = "tests.support.conformance.session_plugin"
SUITES = ("fit", "callbacks")
CALLBACKS = "src/callbacks/"  # the folder of the second suite; the first has all others
TEST_DEADLINE_S, DEADLINE_S = 120, 3600


@dataclass(frozen=True)
class Configuration:
    """Options with which the tests' fits are distributed.

    Attributes:
        algorithm: Preset.
        workers: Number of workers; 0: the tests run plain.
        hooks: Value of ``batch_hooks``.
    """

    algorithm: str
    workers: int
    hooks: str

    def __str__(self) -> str:
        """Return the title of its column."""
        return f"{self.algorithm}, {self.workers}, {self.hooks}"


PLAIN = Configuration("", 0, "")


def installed() -> Path:
    """Return the folder of the installed Keras."""
    spec = find_spec("keras")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def suite_of(test: str) -> str:
    """Return the suite of a test."""
    return "callbacks" if test.startswith(CALLBACKS) else "fit"


def fitting_files(keras: Path, suites: Iterable[str]) -> list[Path]:
    """Return the files of suites that have tests which call ``fit``."""
    files = {file.relative_to(keras).as_posix(): file for file in sorted(keras.glob("src/**/*_test.py"))}
    found = [file for name, file in files.items() if suite_of(name) in suites]
    return [file for file in found if find_fitting_tests(file.read_text(encoding="utf-8"))]


def run(
    suites: Iterable[str], configuration: Configuration, packages: Path, expression: str = ""
) -> dict[str, Outcome]:
    """Run the tests of suites in one process with one cluster, and return their outcomes.

    Args:
        suites: Members of ``SUITES``.
        configuration: How fits are distributed; ``PLAIN``: they are not.
        packages: Folder with packages that only these tests import.
        expression: Expression of pytest (``-k``) that selects some of the tests; "": all.
    """
    keras = installed()
    files = [str(file) for file in fitting_files(keras, suites)]
    options = {"algorithm": configuration.algorithm, "batch_hooks": configuration.hooks}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.jsonl"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, "-c", os.devnull),
            *("--rootdir", str(keras), "--import-mode", "prepend", "--continue-on-collection-errors"),
            *("--timeout", str(TEST_DEADLINE_S), "-k", expression, *files),
        ]
        environment = {
            **os.environ,
            "CONFORMANCE_OUT": str(out),
            "CONFORMANCE_WORKERS": str(configuration.workers),
            "CONFORMANCE_OPTIONS": json.dumps(options if configuration.workers else {}),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", ""), str(packages)])
            ),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        printed = ""
        with suppress(subprocess.TimeoutExpired):  # the outcomes up to there are in the file
            printed = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder
            ).stdout
        if not out.exists():
            raise RuntimeError(f"Keras' tests, {configuration}: expected outcomes. Received none:\n{printed[-3000:]}")
        return read_outcomes(out)
