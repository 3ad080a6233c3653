"""Horovod's own tests of its Keras wrapper, from a checkout, against ``hfdt.keras``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.conformance.keras3_spelling import as_keras3, reason_not_comparable
from tests.support.conformance.outcome_file import read_outcomes
from tests.support.conformance.verdicts import Outcome, Row
from tests.support.ranks import MPIRUN, rank_environment

PLUGIN = "tests.support.conformance.rank_plugin"
PATTERN = "test*keras*.py"
DEADLINE_S = 600


def run(checkout: Path, ranks: int, packages: Path) -> list[Row]:
    """Run the tests of the wrapper, each file in a launch of its own, as Horovod does.

    Args:
        checkout: Folder of Horovod's source.
        ranks: Number of ranks.
        packages: Folder with packages that only these tests import.
    """
    files = sorted((checkout / "test" / "parallel").glob(PATTERN))
    if not files:
        raise RuntimeError(f"{checkout}: expected test/parallel/{PATTERN}. Received: no such file. Pass a checkout.")
    with tempfile.TemporaryDirectory() as folder:
        utils = checkout / "test" / "utils"
        if utils.exists():
            shutil.copytree(utils, Path(folder) / "utils")
        (Path(folder) / "parallel").mkdir()
        return [row for file in files for row in _rows(file, ranks, packages, Path(folder))]


def _rows(file: Path, ranks: int, packages: Path, folder: Path) -> list[Row]:
    out = folder / file.stem
    out.mkdir()
    (folder / "parallel" / file.name).write_text(as_keras3(file.read_text()))
    path = [str(Path.cwd()), os.environ.get("PYTHONPATH", ""), str(packages)]
    environment = {**rank_environment(), "CONFORMANCE_OUT": str(out), "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [
        *([*MPIRUN, "-np", str(ranks)] if ranks > 1 else []),
        *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", PLUGIN, "-c", os.devnull),
        *("--rootdir", str(folder), "-k", "not test_session", f"parallel/{file.name}"),
    ]
    printed = ""
    with suppress(subprocess.TimeoutExpired):  # the outcomes up to there are in the files
        printed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder
        ).stdout
    found = [read_outcomes(one) for one in sorted(out.glob("*.jsonl"))]
    if len(found) != ranks:
        raise RuntimeError(
            f"{file.name}: expected outcomes of {ranks} ranks. Received {len(found)}:\n{printed[-3000:]}"
        )
    return judge_ranks(found)


def judge_ranks(outcomes: Sequence[Mapping[str, Outcome]]) -> list[Row]:
    """Return a row for each test: the first that is not "pass" among those of its ranks."""
    rows = [[_judge(name, found.get(name, Outcome(False))) for found in outcomes] for name in outcomes[0]]
    return [next((row for row in one if row.verdict != "pass"), one[0]) for one in rows]


def _judge(name: str, outcome: Outcome) -> Row:
    name = name.removeprefix("parallel/")
    if outcome.passed:
        return Row(name, "pass")
    if outcome.skipped:
        return Row(name, "not comparable", outcome.line)
    if outcome.refused:
        return Row(name, "refused", outcome.line)
    if reason := reason_not_comparable(outcome.line):
        return Row(name, "not comparable", reason)
    return Row(name, "wrong", outcome.line)
